// The charts of one run's report.

function drawCurves() {
  const { train, val, spent } = data;
  const toEpochs = (values) => values.map((step) => step / data.steps_per_epoch);
  const makeSeries = (name, kind, steps, values, more) => ({ name, kind, steps, epochs: toEpochs(steps), values, ...more });
  const listPair = (metric) => () => [
    makeSeries("training", "train", train.step, train[metric], { smooth: true }),
    makeSeries("validation", "val", val.step, val[metric], { dots: true }),
  ];
  const listRate = () => [makeSeries("learning rate", "rate", train.step, train.learning_rate)];
  const listParts = () => Object.entries(spent)
    .map(([name, values]) => makeSeries(name, `s${data.colours[name]}`, train.step, values))
    .filter((s) => byId("all-time").checked || !data.pauses.includes(s.name));
  const marks = data.resumes.map((step) => ({ epoch: step / data.steps_per_epoch, text: `resumed after step ${step}` }));
  drawAll([
    chart(byId("plot-loss"), "Loss", listPair("loss"), { log: () => byId("log-loss").checked, marks }),
    chart(byId("plot-accuracy"), "Accuracy", listPair("accuracy"), { format: percent, tick: (v) => `${Math.round(100 * v)} %`, top: 1, marks }),
    chart(byId("plot-rate"), "Learning rate", listRate, { marks }),
    chart(byId("plot-norm"), "Gradient norm", () => [makeSeries("gradient norm", "rate", train.step, train.grad_norm, { smooth: true })], { marks }),
    chart(byId("plot-spent"), "Milliseconds per step", listParts, { stacked: true, robust: true, format: (v) => `${number(v)} ms`, tick: number, marks }),
  ]);
}

drawCurves();
drawPod();
root.dataset.drawn = "yes";
