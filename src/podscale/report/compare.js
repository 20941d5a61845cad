// The charts of a comparison of several runs.

const SHADES = data.runs.map((_, i) => `s${i % 8}`);

function drawCurves() {
  const listRuns = () => data.runs.map((run, i) => ({ ...run, shade: SHADES[i] })).filter((_, i) => byId(`run-${i}`).checked);
  const makeSeries = (run, of, metric, more) => ({ name: run.name, kind: run.shade, steps: run[of].step,
    epochs: run[of].step.map((step) => step / run.steps_per_epoch), values: run[of][metric], ...more });
  const listSeries = (of, metric, more) => () => listRuns().map((run) => makeSeries(run, of, metric, more));
  const log = () => byId("log-loss").checked, tick = (v) => `${Math.round(100 * v)} %`;
  drawAll([
    chart(byId("plot-loss"), "Training loss", listSeries("train", "loss", { smooth: true }), { log }),
    chart(byId("plot-accuracy"), "Validation accuracy", listSeries("val", "accuracy", { dots: true }), { format: percent, tick, top: 1 }),
    chart(byId("plot-val-loss"), "Validation loss", listSeries("val", "loss", { dots: true }), { log }),
    chart(byId("plot-rate"), "Learning rate", listSeries("train", "learning_rate", {}), {}),
  ]);
}

drawCurves();
root.dataset.drawn = "yes";
