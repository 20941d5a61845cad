// The report of one run.

function curves() {
  const { train, val, spent } = data;
  const at = (values) => values.map((step) => step / data.steps_per_epoch);
  const one = (name, kind, steps, values, more) => ({ name, kind, steps, epochs: at(steps), values, ...more });
  const pair = (metric) => () => [
    one("training", "train", train.step, train[metric], { smooth: true }),
    one("validation", "val", val.step, val[metric], { dots: true }),
  ];
  const rate = () => [one("learning rate", "rate", train.step, train.learning_rate)];
  const parts = () => Object.entries(spent)
    .map(([name, values]) => one(name, `s${data.colours[name]}`, train.step, values))
    .filter((s) => byId("all-time").checked || !data.pauses.includes(s.name));
  const marks = data.resumes.map((step) => ({ epoch: step / data.steps_per_epoch, text: `resumed after step ${step}` }));
  drawAll([
    chart(byId("plot-loss"), "Loss", pair("loss"), { log: () => byId("log-loss").checked, marks }),
    chart(byId("plot-accuracy"), "Accuracy", pair("accuracy"), { format: percent, tick: (v) => `${Math.round(100 * v)} %`, top: 1, marks }),
    chart(byId("plot-rate"), "Learning rate", rate, { marks }),
    chart(byId("plot-spent"), "Milliseconds of a step", parts, { stacked: true, format: (v) => `${number(v)} ms`, tick: number, marks }),
  ]);
}

curves();
drawPod();
root.dataset.drawn = "yes";
