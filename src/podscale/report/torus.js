// --- the pod --------------------------------------------------------------------------------------------------------

const PITCH = 58, CHIP = 34, EDGE = 36, INNER = 28, DRAWN = 8;

/** Return a ring through all chips, one link per step: whole rows, some to the right, some to the left, so that it closes. */
function makeRing(rows, cols) {
  let rightwards = rows;
  while (rightwards >= 0 && (rows - 2 * rightwards) % cols) rightwards--;
  if (rightwards < 0) return makeRing(cols, rows).map(([col, row]) => [row, col]);
  const chips = [];
  for (let row = 0, start = 0; row < rows; row++) {
    const step = row < rightwards ? 1 : -1;
    for (let i = 0; i < cols; i++) chips.push([row, (((start + step * i) % cols) + cols) % cols]);
    start -= step;
  }
  return chips;
}

/** Return the stages of a summation: `part` is the share of the gradient a chip holds, `sum` the share of chips summed in it. */
function listStages(summation, rows, cols) {
  const N = rows * cols, right = [[0, 1]], down = [[1, 0]], all = [[0, 1], [0, -1], [1, 0], [-1, 0]];
  const stage = (phase, hops, part, sum, ways) => ({ phase, hops, part, sum, ways });
  const side = Math.max(rows, cols);
  const plans = {
    ring: [
      stage("sum", N - 1, [1, 1 / N], [1 / N, 1], "ring"),
      stage("share", N - 1, [1 / N, 1], [1, 1], "ring"),
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
  const selected = plans[summation] || [stage("once", 1, [1, 1], [1 / N, 1], all)];
  return N === 1 ? [] : selected.filter((s) => s.hops > 0);
}

/** Draw the links of the torus as paths, each from a chip to the one to its right or below; the last wraps around. */
function drawLinks(image, rows, cols, centre) {
  const links = new Map();
  const add = (row, col, down, d, wraps) => links.set(`${row},${col},${down}`,
    svg("path", { class: wraps ? "link wrap" : "link", d }, image));
  const half = CHIP / 2, offset = PITCH / 2, out = 22;
  for (let row = 0; row < rows; row++) for (let col = 0; col < cols; col++) {
    const [x, y] = centre(row, col), [x0] = centre(row, 0), [, y0] = centre(0, col);
    if (col + 1 < cols) add(row, col, 0, `M${x + half},${y}H${x + PITCH - half}`, false);
    else if (cols > 1) add(row, col, 0, `M${x + half},${y}c${out},0 ${out},${offset} 0,${offset}H${x0 - half}` +
      `c${-out},0 ${-out},${-offset} 0,${-offset}`, true);
    if (row + 1 < rows) add(row, col, 1, `M${x},${y + half}V${y + PITCH - half}`, false);
    else if (rows > 1) add(row, col, 1, `M${x},${y + half}c0,${out} ${offset},${out} ${offset},0V${y0 - half}` +
      `c0,${-out} ${-offset},${-out} ${-offset},0`, true);
  }
  return links;
}

function drawTiles(image, rows, cols, [high, wide], centre) {
  for (let row = 0; row < rows; row += high) for (let col = 0; col < cols; col += wide) {
    const [x, y] = centre(row, col), h = Math.min(high, rows - row), w = Math.min(wide, cols - col);
    const colour = ((row / high) % 2) * 2 + ((col / wide) % 2);
    svg("rect", { class: `tile t${colour}`, x: x - CHIP / 2 - 7, y: y - CHIP / 2 - 7, rx: 8,
      width: (w - 1) * PITCH + CHIP + 14, height: (h - 1) * PITCH + CHIP + 14 }, image);
  }
}

function drawPod() {
  const { pod } = data, rows = Math.min(pod.rows, DRAWN), cols = Math.min(pod.cols, DRAWN);
  const width = (cols - 1) * PITCH + CHIP + 2 * EDGE, height = (rows - 1) * PITCH + CHIP + 2 * EDGE;
  const image = svg("svg", { viewBox: `0 0 ${width} ${height}`, width: Math.min(width, 420), role: "img",
    "aria-label": `${rows} by ${cols} chips, each linked to its four neighbours, with links around the edges` }, byId("torus"));
  const centre = (row, col) => [EDGE + CHIP / 2 + col * PITCH, EDGE + CHIP / 2 + row * PITCH];
  drawTiles(image, rows, cols, pod.tile, centre);
  const links = drawLinks(image, rows, cols, centre);
  const boxes = [];
  for (let row = 0; row < rows; row++) for (let col = 0; col < cols; col++) {
    const [x, y] = centre(row, col);
    svg("rect", { class: "chip", x: x - CHIP / 2, y: y - CHIP / 2, width: CHIP, height: CHIP, rx: 4 }, image);
    boxes.push(svg("rect", { class: "content" }, image));
  }
  const packets = svg("g", {}, image);
  const animation = { rows, cols, centre, links, boxes, packets, stages: listStages(pod.summation, rows, cols) };
  play(animation);
}

/** Return every [link, backwards] that carries data in a stage. */
function listRoutes(animation, stage) {
  const { rows, cols, links } = animation, routes = [];
  const go = (row, col, down, back) => {
    const from = back ? [(row - down + rows) % rows, (col - 1 + down + cols) % cols] : [row, col];
    const link = links.get(`${from},${down}`);
    if (link) routes.push([link, back]);
  };
  if (stage.ways === "ring") {
    const chips = makeRing(rows, cols);
    chips.forEach(([row, col], i) => {
      const [r, c] = chips[(i + 1) % chips.length], down = r === row ? 0 : 1;
      const back = down ? r === row - 1 || r - row > 1 : c === col - 1 || c - col > 1;
      go(row, col, down, back);
    });
  } else for (const [y, x] of stage.ways)
    for (let row = 0; row < rows; row++) for (let col = 0; col < cols; col++) go(row, col, y ? 1 : 0, x + y < 0);
  return routes;
}

/** Return the stage at `time`, counted in hops, and how many of its hops are over. */
function findStage(animation, time) {
  let before = 0;
  for (const stage of animation.stages) {
    if (time < before + stage.hops) return [stage, time - before];
    before += stage.hops;
  }
  return [animation.stages.at(-1), animation.stages.at(-1).hops];
}

/** Describe the state at `time` in words. */
function describeMoment(animation, time, total) {
  const chips = animation.rows * animation.cols;
  if (time >= total) return `Done: every chip has the whole gradient, with the work of all ${chips} chips added up in it.`;
  if (time < 1) return "At first each chip has only the gradient of its own images.";
  const [stage, within] = findStage(animation, Math.floor(time));
  const between = ([a, b]) => a + (b - a) * within / stage.hops;
  const share = Math.round(100 * between(stage.part)), summed = Math.round(chips * between(stage.sum));
  return `A chip now holds ${share} % of the gradient, with the work of ${summed} of ${chips} chips added up in it.`;
}

/** Draw the state at `time`. */
function drawMoment(animation, time, total) {
  const [stage, within] = findStage(animation, time);
  const between = ([a, b]) => a + (b - a) * within / stage.hops;
  const wide = INNER * Math.sqrt(between(stage.part)), high = INNER * Math.sqrt(between(stage.sum));
  animation.boxes.forEach((box, i) => {
    const [x, y] = animation.centre(Math.floor(i / animation.cols), i % animation.cols);
    const shift = animation.boxes.length > 1 ? i / (animation.boxes.length - 1) * (INNER - wide) : 0;
    const place = { x: x - INNER / 2 + shift, y: y + INNER / 2 - high, width: wide, height: high };
    for (const [key, value] of Object.entries(place)) box.setAttribute(key, value.toFixed(2));
    box.classList.toggle("done", time >= total);
  });
  if (animation.stage !== stage) {
    animation.stage = stage;
    animation.links.forEach((link) => link.classList.remove("busy"));
    animation.routes = listRoutes(animation, stage);
    animation.routes.forEach(([link]) => link.classList.add("busy"));
    animation.packets.replaceChildren();
    animation.dots = animation.routes.map(() => svg("circle", { class: "packet", r: 4 }, animation.packets));
    document.querySelectorAll("#phases li").forEach((li) => li.classList.toggle("now", li.dataset.phase === stage.phase));
  }
  const progress = within % 1;
  animation.packets.setAttribute("visibility", progress ? "visible" : "hidden");
  animation.routes.forEach(([link, back], i) => {
    const point = link.getPointAtLength(link.getTotalLength() * (back ? 1 - progress : progress));
    animation.dots[i].setAttribute("transform", `translate(${point.x.toFixed(1)},${point.y.toFixed(1)})`);
  });
}

function play(animation) {
  const total = animation.stages.reduce((sum, s) => sum + s.hops, 0);
  if (!total) {
    animation.boxes.forEach((box, i) => { box.classList.add("done"); const [x, y] = animation.centre(0, i);
      for (const [k, v] of Object.entries({ x: x - INNER / 2, y: y - INNER / 2, width: INNER, height: INNER })) box.setAttribute(k, v); });
    return;
  }
  const slider = byId("hop"), button = byId("play"), hop_ms = Math.min(Math.max(9000 / total, 70), 1100), PAUSE = 2000 / hop_ms;
  let time = 0, playing = !matchMedia("(prefers-reduced-motion: reduce)").matches, visible = true, last = 0, running = false;
  byId("player").hidden = false;
  slider.max = total;
  const update = () => {
    const at = Math.min(time, total);
    slider.value = at;
    byId("hop-value").textContent = `${Math.ceil(at)} of ${total}`;
    byId("hop-text").textContent = describeMoment(animation, at, total);
    button.textContent = playing ? "Pause" : "Play";
    drawMoment(animation, at, total);
  };
  const frame = (now) => {
    running = playing && visible;
    if (!running) return;
    time = (time + Math.min(now - last, 100) / hop_ms) % (total + PAUSE);
    last = now;
    update();
    requestAnimationFrame(frame);
  };
  const start = () => {
    if (running || !playing || !visible) return;
    running = true;
    requestAnimationFrame((now) => { last = now; frame(now); });
  };
  button.addEventListener("click", () => { playing = !playing; if (playing && time >= total) time = 0; update(); start(); });
  slider.addEventListener("input", () => { playing = false; time = +slider.value; update(); });
  new IntersectionObserver(([entry]) => { visible = entry.isIntersecting; start(); }).observe(byId("torus"));
  update();
  start();
}
