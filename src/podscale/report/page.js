"use strict";
// Draws the curves and the pod from the JSON in the page. Plain ASCII, no library, nothing fetched.

const root = document.documentElement;
addEventListener("error", (event) => { root.dataset.error = event.message; });
addEventListener("securitypolicyviolation", (event) => { root.dataset.error = `blocked: ${event.violatedDirective}`; });

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

function svg(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

// --- curves ---------------------------------------------------------------------------------------------------------

const number = (v) => (v === 0 ? "0" : Math.abs(v) >= 0.001 && Math.abs(v) < 1e5 ? String(+v.toPrecision(4)) : v.toExponential(2));
const percent = (v) => `${(100 * v).toFixed(2)} %`;
const known = (v) => v !== null && v !== undefined;
const epochs = (steps) => steps.map((step) => step / data.steps_per_epoch);
const MARGIN = { left: 52, right: 14, top: 12, bottom: 36 };
const HEIGHT = 250;

/** Exponential moving average without the pull towards its start; unknown values stay unknown. */
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((v) => {
    if (!known(v)) return null;
    sum = weight * sum + v;
    norm = weight * norm + 1;
    return sum / norm;
  });
}

function linearTicks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return ticks;
}

function logTicks(low, high) {
  const exponents = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 },
    (_, i) => Math.floor(Math.log10(low)) + i);
  const ticks = exponents.flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e)).filter((t) => t >= low && t <= high);
  return ticks.length > 1 ? ticks : linearTicks(low, high);
}

/** The range of y, and the function from value to pixel. */
function verticalScale(values, options) {
  const bottom = HEIGHT - MARGIN.bottom;
  const usable = options.log ? values.filter((v) => v > 0) : values;
  let low = options.log ? Math.min(...usable) : 0;
  let high = options.top || Math.max(...usable) * 1.04;
  if (!(high > low)) [low, high] = options.log ? [low / 2, low * 2] : [low, low + 1];
  const at = options.log ? Math.log : (v) => v;
  const share = (v) => (at(v) - at(low)) / (at(high) - at(low));
  return { ticks: options.log ? logTicks(low, high) : linearTicks(low, high),
    y: (v) => (options.log && v <= 0 ? null : bottom - share(v) * (bottom - MARGIN.top)) };
}

function pathOf(xs, ys, x, y) {
  let pen = false, d = "";
  xs.forEach((at, i) => {
    const height = known(ys[i]) ? y(ys[i]) : null;
    if (height !== null) d += `${pen ? "L" : "M"}${x(at).toFixed(1)},${height.toFixed(1)}`;
    pen = height !== null;
  });
  return d;
}

function drawAxes(picture, width, scale, x, lastEpoch, format) {
  const bottom = HEIGHT - MARGIN.bottom;
  for (const tick of scale.ticks) {
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: scale.y(tick), y2: scale.y(tick) }, picture);
    svg("text", { x: MARGIN.left - 6, y: scale.y(tick) + 4, "text-anchor": "end" }, picture, format(tick));
  }
  svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }, picture);
  for (const tick of linearTicks(0, lastEpoch))
    svg("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, picture, number(tick));
  svg("text", { x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, picture, "epoch");
  for (const step of data.resumes) {
    const mark = svg("line", { class: "resume", x1: x(step / data.steps_per_epoch), x2: x(step / data.steps_per_epoch),
      y1: MARGIN.top, y2: bottom }, picture);
    svg("title", {}, mark, `resumed after step ${step}`);
  }
}

/** A chart in `holder`; returns the function that draws it anew. */
function chart(holder, name, series, options) {
  const format = options.format || number;
  const longest = series.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
  let cursor = -1;

  function draw() {
    holder.replaceChildren();
    const values = series.flatMap((s) => s.values).filter(known);
    if (!values.length) {
      holder.textContent = "Nothing measured yet.";
      return;
    }
    const width = Math.max(holder.clientWidth, 240);
    const lastEpoch = Math.max(...series.flatMap((s) => epochs(s.steps)));
    const x = (epoch) => MARGIN.left + (epoch / lastEpoch) * (width - MARGIN.left - MARGIN.right);
    const scale = verticalScale(values, { log: options.log && options.log(), top: options.top });
    const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": spoken(name, series, format) }, holder);
    drawAxes(picture, width, scale, x, lastEpoch, options.tick || format);
    for (const s of series) drawSeries(picture, s, x, scale.y);
    addCursor(picture, width, x, scale.y);
  }

  function drawSeries(picture, s, x, y) {
    const xs = epochs(s.steps), weight = s.smooth ? +byId("smoothing").value : 0;
    s.shown = weight ? smoothed(s.values, weight) : s.values;
    if (weight) svg("path", { class: `raw ${s.kind}`, d: pathOf(xs, s.values, x, y) }, picture);
    svg("path", { class: s.kind, d: pathOf(xs, s.shown, x, y) }, picture);
    const radius = xs.length > 60 ? 1.5 : 3.5;
    if (s.dots || xs.length === 1) xs.forEach((at, i) => {
      const height = known(s.values[i]) ? y(s.values[i]) : null;
      if (height !== null) svg("circle", { class: s.kind, cx: x(at), cy: height, r: radius }, picture);
    });
  }

  function addCursor(picture, width, x, y) {
    const layer = svg("g", {}, picture), tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    holder.append(tip);
    const hide = () => { layer.replaceChildren(); tip.hidden = true; };
    const show = (index) => {
      cursor = Math.min(Math.max(index, 0), longest.steps.length - 1);
      const step = longest.steps[cursor], at = x(step / data.steps_per_epoch);
      hide();
      svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }, layer);
      const lines = [`step ${Math.round(step)}, epoch ${(step / data.steps_per_epoch).toFixed(1)}`];
      for (const s of series) {
        const i = nearest(s.steps, step), raw = s.values[i], height = known(raw) ? y(s.shown[i]) : null;
        if (i < 0) continue;
        const away = s === longest ? "" : ` at step ${Math.round(s.steps[i])}`;
        lines.push(`${s.name} ${known(raw) ? format(raw) : "not a number"}${away}`);
        if (height !== null) svg("circle", { class: s.kind, cx: x(s.steps[i] / data.steps_per_epoch), cy: height, r: 4 }, layer);
      }
      tip.textContent = lines.join("\n");
      tip.hidden = false;
      tip.style.left = `${at < width / 2 ? Math.min(at + 10, width - tip.offsetWidth) : Math.max(at - tip.offsetWidth - 10, 0)}px`;
    };
    const pick = (event) => {
      const box = picture.getBoundingClientRect();
      const share = ((event.clientX - box.left) / box.width * width - MARGIN.left) / (x(1) - x(0));
      show(nearest(longest.steps, share * data.steps_per_epoch));
    };
    picture.addEventListener("pointermove", pick);
    picture.addEventListener("pointerdown", pick);
    picture.addEventListener("pointerleave", hide);
    picture.addEventListener("blur", hide);
    picture.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      show(cursor + move);
    });
  }
  return draw;
}

/** Index of the step nearest to `step`; -1 if there is none. */
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return steps.length && Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : steps.length ? low : -1;
}

function spoken(name, series, format) {
  const parts = series.map((s) => ({ name: s.name, values: s.values.filter(known) })).filter((s) => s.values.length);
  return `${name} by epoch. ` + parts.map((s) => `${s.name} from ${format(s.values[0])} to ${format(s.values.at(-1))}`).join("; ");
}

function curves() {
  const { train, val } = data;
  const pair = (metric) => [
    { name: "training", kind: "train", steps: train.step, values: train[metric], smooth: true },
    { name: "validation", kind: "val", steps: val.step, values: val[metric], dots: true },
  ];
  const rate = [{ name: "learning rate", kind: "rate", steps: train.step, values: train.learning_rate }];
  const draws = [
    chart(byId("plot-loss"), "Loss", pair("loss"), { log: () => byId("log-loss").checked }),
    chart(byId("plot-accuracy"), "Accuracy", pair("accuracy"), { format: percent, tick: (v) => `${Math.round(100 * v)} %`, top: 1 }),
    chart(byId("plot-rate"), "Learning rate", rate, {}),
  ];
  const drawAll = () => {
    byId("smoothing-value").textContent = (+byId("smoothing").value).toFixed(2);
    draws.forEach((draw) => draw());
  };
  byId("smoothing").addEventListener("input", drawAll);
  byId("log-loss").addEventListener("change", drawAll);
  addEventListener("resize", drawAll);
  drawAll();
}

// --- the pod --------------------------------------------------------------------------------------------------------

const PITCH = 58, CHIP = 34, EDGE = 36, INNER = 28, DRAWN = 8;

/** A closed walk over all chips, one link a step: whole rows, some rightwards, some leftwards, so that it closes. */
function walk(rows, cols) {
  let rightwards = rows;
  while (rightwards >= 0 && (rows - 2 * rightwards) % cols) rightwards--;
  if (rightwards < 0) return walk(cols, rows).map(([col, row]) => [row, col]);
  const chips = [];
  for (let row = 0, start = 0; row < rows; row++) {
    const step = row < rightwards ? 1 : -1;
    for (let i = 0; i < cols; i++) chips.push([row, (((start + step * i) % cols) + cols) % cols]);
    start -= step;
  }
  return chips;
}

/** What happens, hop by hop: `part` is the share of the gradient a chip holds, `sum` the share of chips summed in it. */
function stages(summation, rows, cols) {
  const N = rows * cols, right = [[0, 1]], down = [[1, 0]], all = [[0, 1], [0, -1], [1, 0], [-1, 0]];
  const stage = (phase, hops, part, sum, ways) => ({ phase, hops, part, sum, ways });
  const side = Math.max(rows, cols);
  const plans = {
    ring: [
      stage("sum", N - 1, [1, 1 / N], [1 / N, 1], "walk"),
      stage("share", N - 1, [1 / N, 1], [1, 1], "walk"),
    ],
    torus: [
      stage("rows-sum", cols - 1, [1, 1 / cols], [1 / N, cols / N], right),
      stage("columns", rows - 1, [1 / cols, 1 / N], [cols / N, 1], down),
      stage("columns", rows - 1, [1 / N, 1 / cols], [1, 1], down),
      stage("rows-share", cols - 1, [1 / cols, 1], [1, 1], right),
    ],
    torus4: [
      stage("first", side - 1, [1, 1 / side], [1 / N, side / N], all),
      stage("second", side - 1, [1 / side, 1 / N], [side / N, 1], all),
      stage("second", side - 1, [1 / N, 1 / side], [1, 1], all),
      stage("share", side - 1, [1 / side, 1], [1, 1], all),
    ],
  };
  plans.ring2 = plans.ring;
  plans.sharded = plans.torus;
  const chosen = plans[summation] || [stage("once", 1, [1, 1], [1 / N, 1], all)];
  return N === 1 ? [] : chosen.filter((s) => s.hops > 0);
}

/** The links of the torus as paths, each from a chip to the one right of or below it; the last wraps around. */
function drawLinks(picture, rows, cols, centre) {
  const links = new Map();
  const add = (row, col, down, d, wraps) => links.set(`${row},${col},${down}`,
    svg("path", { class: wraps ? "link wrap" : "link", d }, picture));
  const half = CHIP / 2, lane = PITCH / 2, out = 22;
  for (let row = 0; row < rows; row++) for (let col = 0; col < cols; col++) {
    const [x, y] = centre(row, col), [x0] = centre(row, 0), [, y0] = centre(0, col);
    if (col + 1 < cols) add(row, col, 0, `M${x + half},${y}H${x + PITCH - half}`, false);
    else if (cols > 1) add(row, col, 0, `M${x + half},${y}c${out},0 ${out},${lane} 0,${lane}H${x0 - half}` +
      `c${-out},0 ${-out},${-lane} 0,${-lane}`, true);
    if (row + 1 < rows) add(row, col, 1, `M${x},${y + half}V${y + PITCH - half}`, false);
    else if (rows > 1) add(row, col, 1, `M${x},${y + half}c0,${out} ${lane},${out} ${lane},0V${y0 - half}` +
      `c0,${-out} ${-lane},${-out} ${-lane},0`, true);
  }
  return links;
}

function drawTiles(picture, rows, cols, [high, wide], centre) {
  for (let row = 0; row < rows; row += high) for (let col = 0; col < cols; col += wide) {
    const [x, y] = centre(row, col), h = Math.min(high, rows - row), w = Math.min(wide, cols - col);
    const colour = ((row / high) % 2) * 2 + ((col / wide) % 2);
    svg("rect", { class: `tile t${colour}`, x: x - CHIP / 2 - 7, y: y - CHIP / 2 - 7, rx: 8,
      width: (w - 1) * PITCH + CHIP + 14, height: (h - 1) * PITCH + CHIP + 14 }, picture);
  }
}

function drawPod() {
  const { pod } = data, rows = Math.min(pod.rows, DRAWN), cols = Math.min(pod.cols, DRAWN);
  const width = (cols - 1) * PITCH + CHIP + 2 * EDGE, height = (rows - 1) * PITCH + CHIP + 2 * EDGE;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width: width * Math.min(Math.max(420 / width, 1), 2), role: "img",
    "aria-label": `${rows} by ${cols} chips, each linked to its four neighbours, with links around the edges` }, byId("torus"));
  const centre = (row, col) => [EDGE + CHIP / 2 + col * PITCH, EDGE + CHIP / 2 + row * PITCH];
  drawTiles(picture, rows, cols, pod.tile, centre);
  const links = drawLinks(picture, rows, cols, centre);
  const held = [];
  for (let row = 0; row < rows; row++) for (let col = 0; col < cols; col++) {
    const [x, y] = centre(row, col);
    svg("rect", { class: "chip", x: x - CHIP / 2, y: y - CHIP / 2, width: CHIP, height: CHIP, rx: 4 }, picture);
    held.push(svg("rect", { class: "held" }, picture));
  }
  const packets = svg("g", {}, picture);
  const film = { rows, cols, centre, links, held, packets, stages: stages(pod.summation, rows, cols) };
  play(film);
}

/** Every [link, backwards] that carries data in a stage. */
function routes(film, stage) {
  const { rows, cols, links } = film, found = [];
  const go = (row, col, down, back) => {
    const from = back ? [(row - down + rows) % rows, (col - 1 + down + cols) % cols] : [row, col];
    const link = links.get(`${from},${down}`);
    if (link) found.push([link, back]);
  };
  if (stage.ways === "walk") {
    const chips = walk(rows, cols);
    chips.forEach(([row, col], i) => {
      const [r, c] = chips[(i + 1) % chips.length], down = r === row ? 0 : 1;
      const back = down ? r === row - 1 || r - row > 1 : c === col - 1 || c - col > 1;
      go(row, col, down, back);
    });
  } else for (const [y, x] of stage.ways)
    for (let row = 0; row < rows; row++) for (let col = 0; col < cols; col++) go(row, col, y ? 1 : 0, x + y < 0);
  return found;
}

/** Shows the moment `time`, counted in hops. */
function show(film, time, total) {
  let before = 0, stage = film.stages.at(-1), within = stage.hops;
  for (const s of film.stages) {
    if (time < before + s.hops) { stage = s; within = time - before; break; }
    before += s.hops;
  }
  const between = ([a, b]) => a + (b - a) * within / stage.hops;
  const wide = INNER * Math.sqrt(between(stage.part)), high = INNER * Math.sqrt(between(stage.sum));
  film.held.forEach((box, i) => {
    const [x, y] = film.centre(Math.floor(i / film.cols), i % film.cols);
    const shift = film.held.length > 1 ? i / (film.held.length - 1) * (INNER - wide) : 0;
    const place = { x: x - INNER / 2 + shift, y: y + INNER / 2 - high, width: wide, height: high };
    for (const [key, value] of Object.entries(place)) box.setAttribute(key, value.toFixed(2));
    box.classList.toggle("done", time >= total);
  });
  if (film.stage !== stage) {
    film.stage = stage;
    film.links.forEach((link) => link.classList.remove("busy"));
    film.routes = routes(film, stage);
    film.routes.forEach(([link]) => link.classList.add("busy"));
    film.packets.replaceChildren();
    film.dots = film.routes.map(() => svg("circle", { class: "packet", r: 4 }, film.packets));
    document.querySelectorAll("#phases li").forEach((li) => li.classList.toggle("now", li.dataset.phase === stage.phase));
  }
  const progress = within % 1;
  film.packets.setAttribute("visibility", progress ? "visible" : "hidden");
  film.routes.forEach(([link, back], i) => {
    const point = link.getPointAtLength(link.getTotalLength() * (back ? 1 - progress : progress));
    film.dots[i].setAttribute("transform", `translate(${point.x.toFixed(1)},${point.y.toFixed(1)})`);
  });
}

function play(film) {
  const total = film.stages.reduce((sum, s) => sum + s.hops, 0);
  if (!total) {
    film.held.forEach((box, i) => { box.classList.add("done"); const [x, y] = film.centre(0, i);
      for (const [k, v] of Object.entries({ x: x - INNER / 2, y: y - INNER / 2, width: INNER, height: INNER })) box.setAttribute(k, v); });
    return;
  }
  const slider = byId("hop"), button = byId("play"), hop_ms = Math.min(Math.max(9000 / total, 70), 1100), REST = 2000 / hop_ms;
  let time = 0, playing = !matchMedia("(prefers-reduced-motion: reduce)").matches, seen = true, last = 0, running = false;
  byId("player").hidden = false;
  slider.max = total;
  const update = () => {
    const at = Math.min(time, total);
    slider.value = at;
    byId("hop-value").textContent = `${Math.ceil(at)} of ${total}`;
    button.textContent = playing ? "Pause" : "Play";
    show(film, at, total);
  };
  const frame = (now) => {
    running = playing && seen;
    if (!running) return;
    time = (time + Math.min(now - last, 100) / hop_ms) % (total + REST);
    last = now;
    update();
    requestAnimationFrame(frame);
  };
  const start = () => {
    if (running || !playing || !seen) return;
    running = true;
    requestAnimationFrame((now) => { last = now; frame(now); });
  };
  button.addEventListener("click", () => { playing = !playing; if (playing && time >= total) time = 0; update(); start(); });
  slider.addEventListener("input", () => { playing = false; time = +slider.value; update(); });
  new IntersectionObserver(([entry]) => { seen = entry.isIntersecting; start(); }).observe(byId("torus"));
  update();
  start();
}

// Paper has no fold-outs: print what is in them.
let folded = [];
addEventListener("beforeprint", () => { folded = [...document.querySelectorAll("details:not([open])")]; folded.forEach((d) => { d.open = true; }); });
addEventListener("afterprint", () => folded.forEach((d) => { d.open = false; }));

curves();
drawPod();
root.dataset.drawn = "yes";
