// Several runs together.

const SHADES = data.runs.map((_, i) => `s${i % 8}`);

function curves() {
  const shown = () => data.runs.map((run, i) => ({ ...run, shade: SHADES[i] })).filter((_, i) => byId(`run-${i}`).checked);
  const one = (run, of, metric, more) => ({ name: run.name, kind: run.shade, steps: run[of].step,
    epochs: run[of].step.map((step) => step / run.steps_per_epoch), values: run[of][metric], ...more });
  const all = (of, metric, more) => () => shown().map((run) => one(run, of, metric, more));
  const log = () => byId("log-loss").checked, tick = (v) => `${Math.round(100 * v)} %`;
  drawAll([
    chart(byId("plot-loss"), "Training loss", all("train", "loss", { smooth: true }), { log }),
    chart(byId("plot-accuracy"), "Validation accuracy", all("val", "accuracy", { dots: true }), { format: percent, tick, top: 1 }),
    chart(byId("plot-val-loss"), "Validation loss", all("val", "loss", { dots: true }), { log }),
    chart(byId("plot-rate"), "Learning rate", all("train", "learning_rate", {}), {}),
  ]);
}

curves();
root.dataset.drawn = "yes";
