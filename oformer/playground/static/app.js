// The playground: a state (a curve, a medium, vortices, sources, a stream) is drawn or changed here, sent to the
// service, and what the operator and the solver say of it is drawn beside it. No libraries, no build.

const $ = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const number = (x) => (x !== 0 && (Math.abs(x) >= 1e4 || Math.abs(x) < 1e-2) ? x.toExponential(2) : String(Number(x.toPrecision(3))));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const page = {
  model: null, // what the service says of the operator
  state: null,
  sensors: null,
  resolution: 0,
  channel: 0,
  frame: 0,
  cursor: [0.5, 0.5], // where the keyboard points
  mode: "",
  answer: null, // the last one of the operator, arrays decoded
  solution: null, // and of the solver, for the same state and places
  settled: () => !live.asking && !live.choosing, // whether the answer is that to the state
};
globalThis.playground = page; // for those who look behind it with the browser's console

// ---- the service

async function ask(path, body, signal) {
  const settings = body === undefined ? {} : {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
  };
  for (let tries = 1; ; tries++) {
    const response = await fetch(path, { ...settings, signal });
    const content = await response.json();
    if (response.ok) return content;
    if (response.status !== 503 || tries === 5) throw new Error(content.error ?? `The service answered ${response.status}.`);
    say("Others are being answered; waiting…");
    await new Promise((resolve) => setTimeout(resolve, 1000 * Number(response.headers.get("Retry-After") ?? 1)));
  }
}

function decoded(array) {
  const bytes = Uint8Array.from(atob(array.base64), (c) => c.charCodeAt(0));
  const values = array.type === "int32" ? new Int32Array(bytes.buffer) : new Float32Array(bytes.buffer);
  return { values, shape: array.shape };
}

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

const place = (action) => `v1/models/${encodeURIComponent(page.model.name)}/${action}`;

// The operator is asked again as soon as it has answered, with whatever the state is by then: one request at a time,
// none for states that are already past.
const live = { asking: false, changed: false, choosing: 0, usual: 0 };

// Where answers are slow, the first one and those under a moving pointer are coarse; the chosen one follows.
function wantsDraft() {
  const { play } = page.model;
  const coarser = page.resolution > play.draft.resolution || play.drafts || page.sensors.stride < play.draft.stride;
  return coarser && (page.answer === null || (pointer.last !== null && live.usual > 0.25));
}

// The same question with fewer sensors, for few points, from an input that is nearly exact.
function draftOf({ sensors, ...question }) {
  const { stride, share, resolution } = page.model.play.draft;
  const fewer = { stride: Math.max(sensors.stride, stride), share: Math.min(sensors.share, share) };
  return { ...question, resolution, sensors: { ...sensors, ...fewer }, draft: true };
}

async function refresh() {
  live.changed = true;
  forgetSolution();
  if (live.asking) return;
  live.asking = true;
  while (live.changed) {
    live.changed = false;
    const model = page.model, draft = wantsDraft();
    try {
      const { state, channel, sensors, resolution } = page, question = { state, channel, sensors, resolution };
      const start = performance.now();
      const slow = setTimeout(() => say("Thinking…"), 400);
      const content = await ask(place("play"), draft ? draftOf(question) : question).finally(() => clearTimeout(slow));
      if (model !== page.model) continue;
      page.answer = {
        sensors: { coords: decoded(content.sensors.coords), values: decoded(content.sensors.values), usual: content.sensors.usual },
        places: content.places.kind === "mesh"
          ? { ...content.places, coords: decoded(content.places.coords), triangles: decoded(content.places.triangles) }
          : content.places,
        prediction: decoded(content.prediction),
        seconds: content.seconds,
        unseen: content.unseen,
        stride: (draft ? draftOf(question) : question).sensors.stride,
        roundTrip: (performance.now() - start) / 1000,
        draft,
      };
      if (!draft) live.usual = content.seconds.input + content.seconds.prediction;
      if (draft && !pointer.last) live.changed = true; // now in full
      say("");
    } catch (error) {
      say(error.message, true);
      break;
    } finally {
      document.body.dataset.answers = Number(document.body.dataset.answers ?? 0) + 1;
    }
    draw();
  }
  live.asking = false;
  if ($("compare").checked && !page.model.play.slow) solveSoon();
}

const solver = { timer: 0, abort: null };

function forgetSolution() {
  clearTimeout(solver.timer);
  solver.abort?.abort();
  page.solution = null;
}

function solveSoon() {
  clearTimeout(solver.timer);
  solver.timer = setTimeout(solve, 250);
}

async function solve() {
  solver.abort?.abort();
  const abort = (solver.abort = new AbortController());
  const { state, resolution, channel } = page;
  const slow = setTimeout(() => say("Solving…"), 300);
  try {
    const content = await ask(place("solve"), { state, resolution, channel }, abort.signal);
    if (abort.signal.aborted) return;
    page.solution = { values: decoded(content.solution), seconds: content.seconds, solver: content.solver };
    say("");
    draw();
    document.body.dataset.solutions = Number(document.body.dataset.solutions ?? 0) + 1;
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  } finally {
    clearTimeout(slow);
  }
}

// ---- colors

const SEQUENTIAL = ["#440154", "#472f7d", "#39568c", "#2a788e", "#22a884", "#7ad151", "#fde725"].map(channels);
const DIVERGING = ["#053061", "#2f79b5", "#a7cfe4", "#f7f7f7", "#f9b99a", "#c94741", "#67001f"].map(channels);

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function shade(stops, share) {
  const at = clamp(share, 0, 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2), t = at - low;
  return stops[low].map((c, i) => Math.round(c + t * (stops[low + 1][i] - c)));
}

// From white through zero where values have both signs, else from the lowest to the highest.
function scaleOf(...arrays) {
  let low = Infinity, high = -Infinity;
  for (const values of arrays) {
    for (const v of values) {
      if (v < low) low = v;
      if (v > high) high = v;
    }
  }
  const signed = low < 0 && high > 0 && Math.min(-low, high) > 0.1 * Math.max(-low, high);
  if (signed) [low, high] = [-Math.max(-low, high), Math.max(-low, high)];
  if (high <= low) high = low + (Math.abs(low) || 1);
  const stops = signed ? DIVERGING : SEQUENTIAL;
  const table = Array.from({ length: 256 }, (_, i) => shade(stops, i / 255));
  return { low, high, table, of: (v) => table[clamp(Math.round(((v - low) / (high - low)) * 255), 0, 255)] };
}

function drawScale(id, scale) {
  const box = $(id);
  const bar = document.createElement("canvas");
  bar.width = 256;
  bar.height = 1;
  const pixels = new ImageData(256, 1);
  scale.table.forEach((c, i) => pixels.data.set([...c, 255], 4 * i));
  bar.getContext("2d").putImageData(pixels, 0, 0);
  bar.setAttribute("aria-hidden", "true");
  const [low, high] = [scale.low, scale.high].map((v) => Object.assign(document.createElement("span"), { textContent: number(v) }));
  box.replaceChildren(low, bar, high);
}

// ---- drawing

// A canvas in its true pixels, and the map between the domain and them; y goes up.
function prepared(id, box, ratio) {
  const canvas = $(id), width = canvas.clientWidth || 300, dense = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(width * ratio * dense);
  canvas.style.height = `${width * ratio}px`;
  const [left, right, bottom, top] = box;
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  return {
    canvas, context, dense, box,
    x: (x) => ((x - left) / (right - left)) * canvas.width,
    y: (y) => (1 - (y - bottom) / (top - bottom)) * canvas.height,
  };
}

const UNIT = [0, 1, 0, 1];

function boxOf(places) {
  if (places.kind !== "mesh") return UNIT;
  if (places.window) return places.window;
  const low = [Infinity, Infinity], high = [-Infinity, -Infinity], points = places.coords.values;
  for (let i = 0; i < points.length; i++) {
    low[i % 2] = Math.min(low[i % 2], points[i]);
    high[i % 2] = Math.max(high[i % 2], points[i]);
  }
  return [low[0] - 0.03, high[0] + 0.03, low[1] - 0.03, high[1] + 0.03];
}

const ratioOf = (box) => (box[3] - box[2]) / (box[1] - box[0]);

function drawGrid(id, places, values, scale) {
  const [n, m] = places.points, view = prepared(id, UNIT, 1);
  const pixels = new ImageData(n, m);
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < m; j++) {
      pixels.data.set([...scale.of(values[i * m + j]), 255], 4 * ((m - 1 - j) * n + i));
    }
  }
  const small = new OffscreenCanvas(n, m);
  small.getContext("2d").putImageData(pixels, 0, 0);
  view.context.imageSmoothingEnabled = page.answer.draft; // else each point is seen as it is
  view.context.drawImage(small, 0, 0, view.canvas.width, view.canvas.height);
  return view;
}

function drawMesh(id, places, values, scale) {
  const box = boxOf(places), view = prepared(id, box, ratioOf(box)), { context } = view;
  const points = places.coords.values, corners = places.triangles.values;
  const cuts = !values || corners.length > 12000 ? 1 : corners.length > 3000 ? 2 : 5; // each one is of one color
  context.lineWidth = 1;
  for (let t = 0; t < corners.length; t += 3) {
    const nodes = [corners[t], corners[t + 1], corners[t + 2]];
    const xs = nodes.map((i) => points[2 * i]), ys = nodes.map((i) => points[2 * i + 1]);
    if (Math.max(...xs) < box[0] || Math.min(...xs) > box[1] || Math.max(...ys) < box[2] || Math.min(...ys) > box[3]) continue;
    for (const piece of PIECES[cuts]) {
      const mix = (corner, three) => corner[0] * three[0] + corner[1] * three[1] + corner[2] * three[2];
      context.beginPath();
      for (const corner of piece) context.lineTo(view.x(mix(corner, xs)), view.y(mix(corner, ys)));
      context.closePath();
      if (values) {
        const middle = [0, 1, 2].map((k) => (piece[0][k] + piece[1][k] + piece[2][k]) / 3);
        context.fillStyle = context.strokeStyle = `rgb(${scale.of(mix(middle, nodes.map((i) => values[i])))})`;
        context.fill();
      } else {
        context.strokeStyle = color("--edge");
      }
      context.stroke();
    }
  }
  return view;
}

// A triangle cut into n x n equal ones: their corners, as shares of its own three.
function pieces(n) {
  const at = (i, j) => [i / n, j / n, 1 - (i + j) / n], found = [];
  for (let i = 0; i < n; i++) {
    for (let j = 0; i + j < n; j++) {
      found.push([at(i, j), at(i + 1, j), at(i, j + 1)]);
      if (i + j < n - 1) found.push([at(i + 1, j), at(i + 1, j + 1), at(i, j + 1)]);
    }
  }
  return found;
}

const PIECES = { 1: pieces(1), 2: pieces(2), 5: pieces(5) };

function drawField(id, values, scale) {
  const { places } = page.answer;
  const view = places.kind === "mesh" ? drawMesh(id, places, values, scale) : drawGrid(id, places, values, scale);
  drawScale(`${id}-scale`, scale);
  return view;
}

const LINE_RATIO = 0.62; // height of a picture of lines by its width

function drawLines(id, lines, top) {
  const view = prepared(id, [0, 1, -top, top], LINE_RATIO), { context, dense } = view;
  context.lineWidth = dense;
  context.strokeStyle = color("--edge");
  const marks = [-top, -top / 2, 0, top / 2, top];
  for (const y of marks) {
    context.beginPath();
    context.moveTo(0, view.y(y));
    context.lineTo(view.canvas.width, view.y(y));
    context.stroke();
  }
  for (const { values, stroke, dashed } of lines) {
    context.beginPath();
    const n = values.length;
    for (let i = 0; i <= n; i++) context.lineTo(view.x(i / n), view.y(values[i % n]));
    context.strokeStyle = color(stroke);
    context.lineWidth = 2 * dense;
    context.setLineDash(dashed ? [6 * dense, 4 * dense] : []);
    context.stroke();
    context.setLineDash([]);
  }
  // Last, on paper of their own: a curve may pass there.
  context.font = `${11 * dense}px system-ui, sans-serif`;
  context.strokeStyle = color("--paper");
  context.lineWidth = 3 * dense;
  context.fillStyle = color("--muted");
  for (const y of marks) {
    const at = [number(y), 4 * dense, view.y(y) + (y > 0 ? 13 : -4) * dense];
    context.strokeText(...at);
    context.fillText(...at);
  }
  return view;
}

// The next round number above, so that the axis stays while a curve is bent.
const roundedUp = (x) => {
  const ten = 10 ** Math.floor(Math.log10(Math.max(x, 1e-12)));
  return [1, 2, 5, 10].find((k) => k * ten >= x) * ten;
};
const largest = (values) => values.reduce((most, v) => Math.max(most, Math.abs(v)), 0);
const slice = (array, frame) => {
  const size = array.shape[1];
  return array.values.subarray(frame * size, (frame + 1) * size);
};

const title = (id, text) => ($(id).textContent = text);
const label = (id, text) => $(id).setAttribute("aria-label", text);
const range = (values) => `from ${number(Math.min(...values))} to ${number(Math.max(...values))}`;

function draw() {
  const { answer, solution, model } = page;
  if (!answer) return;
  const shown = model.spec.in_times;
  const frames = answer.prediction.shape[0], steady = frames === 1 && shown === 1;
  $("time").hidden = steady;
  $("frame").max = shown + frames - 1;
  page.frame = steady ? shown : clamp(page.frame, 0, shown + frames - 1);
  $("frame").value = page.frame;
  const later = clamp(page.frame - shown, 0, frames - 1);
  const now = page.frame < shown ? `input ${page.frame + 1} of ${shown}` : `answer ${later + 1} of ${frames}`;
  $("frame-text").textContent = now;
  $("frame").setAttribute("aria-valuetext", now);
  const prediction = slice(answer.prediction, later), truth = solution && slice(solution.values, later);
  const difference = truth && prediction.map((p, i) => p - truth[i]);
  const target = model.targets[page.channel] ?? "answer", input = model.inputs[model.picture.input] ?? "input";
  const line = answer.places.kind === "line";
  // Their places are kept while the solver is at work, so that nothing moves under the pointer.
  const compared = Boolean(solution) || ($("compare").checked && !model.play.slow);
  for (const element of document.querySelectorAll(".truth")) element.hidden = !compared;
  $("solution").parentElement.hidden = !compared || line;
  if (compared && !solution) clearTruth(line);
  title("input-title", `Input: ${input}${steady ? "" : `, frame ${inputFrame() + 1}`}`);
  title("prediction-title", line && solution ? `${target}: operator, and solver (dashed)` : `Operator: ${target}`);
  title("solution-title", `Solver: ${target}`);
  title("error-title", `Difference: ${target}`);
  tools().draw();
  if (line) {
    const lines = [{ values: prediction, stroke: "--prediction" }];
    if (truth) lines.push({ values: truth, stroke: "--solution", dashed: true });
    drawLines("prediction", lines, roundedUp(largest(prediction)));
    if (difference) drawLines("error", [{ values: difference, stroke: "--error" }], roundedUp(largest(difference)));
  } else {
    const scale = scaleOf(truth ? solution.values.values : answer.prediction.values);
    drawField("prediction", prediction, scale);
    if (difference) {
      drawField("solution", truth, scale);
      drawField("error", difference, scaleOf(difference));
    }
  }
  label("prediction", `${target} as the operator predicts it, ${range(prediction)}`);
  if (difference) {
    label("solution", `${target} as the solver has it, ${range(truth)}`);
    label("error", `Operator less solver, ${range(difference)}`);
  }
  report();
}

function clearTruth(line) {
  const box = boxOf(page.answer.places);
  for (const id of ["solution", "error"]) {
    prepared(id, box, line ? LINE_RATIO : ratioOf(box));
    $(`${id}-scale`).replaceChildren();
    label(id, "The solver is at work.");
  }
  for (const id of ["solver-time", "error-number"]) $(id).textContent = "…";
}

// Of all frames, as test errors are measured.
function relativeError(prediction, truth) {
  let error = 0, size = 0;
  for (let i = 0; i < truth.length; i++) {
    error += (prediction[i] - truth[i]) ** 2;
    size += truth[i] ** 2;
  }
  return Math.sqrt(error / Math.max(size, 1e-300));
}

function report() {
  const { answer, solution, model } = page;
  const queries = answer.prediction.shape[1].toLocaleString(), used = answer.sensors.coords.shape[0];
  $("operator-time").textContent = `${milliseconds(answer.seconds.prediction)} for ${queries} points`;
  if (model.spec.in_times > 1) {
    $("operator-time").textContent += `; the frames it sees took ${milliseconds(answer.seconds.input)}`;
  }
  $("sensor-count").textContent = `${used.toLocaleString()} (training had ${answer.sensors.usual.toLocaleString()})`;
  drawQuick();
  $("unseen").textContent = answer.unseen ? `New to the operator: ${answer.unseen}.` : "";
  if (solution) {
    page.error = relativeError(answer.prediction.values, solution.values.values);
    const all = model.targets.length > 1 ? " in all channels" : "";
    const tested = model.play.tested && ` (${model.play.tested})`;
    const mean = model.error === null ? "" : `; on the ${model.scored} samples${tested} ${percent(model.error)}${all}`;
    $("error-number").textContent = `${percent(page.error)} relative L2${mean}`;
    $("solver-time").textContent = `${milliseconds(solution.seconds)} (${solution.solver})`;
  }
}

const percent = (share) => `${(100 * share).toPrecision(3)} %`;
const milliseconds = (s) => (s >= 1 ? `${s.toFixed(1)} s` : `${Math.max(1, Math.round(1000 * s))} ms`);

// ---- what can be changed, by kind of scene

const BRUSH = 0.05; // of the width of the picture
const clone = (value) => JSON.parse(JSON.stringify(value));
const distance = (a, b) => Math.hypot(...a.map((x, i) => x - b[i]));
const SENSOR_MODES = { erase: "erase sensors", add: "add a sensor" };

// The frame of the input that is in view: under an answer the last one, or the first where the pointer changes that.
function inputFrame() {
  const shown = page.model.spec.in_times;
  return page.frame < shown ? page.frame : tools().changesFirst ? 0 : shown - 1;
}

// Sensors as squares of the color of what they see: where there is none, the paper shows.
function drawSensors(id) {
  const { coords } = page.answer.sensors, values = slice(page.answer.sensors.values, inputFrame());
  const scale = scaleOf(page.answer.sensors.values.values), view = prepared(id, UNIT, 1);
  const size = Math.ceil(view.canvas.width / perAxis(page.answer.stride)) + 1; // a pixel more than needed leaves no gaps
  const [left, up] = page.model.spec.periods ? [0, 1] : [0.5, 0.5]; // the points of a period are corners of its cells
  for (let i = 0; i < values.length; i++) {
    const x = view.x(coords.values[2 * i]) - left * size, y = view.y(coords.values[2 * i + 1]) - up * size;
    view.context.fillStyle = `rgb(${scale.of(values[i])})`;
    view.context.fillRect(Math.floor(x), Math.floor(y), size, size);
  }
  drawScale(`${id}-scale`, scale);
  return view;
}

// The same on a mesh, as dots.
function drawNodes(id) {
  const view = drawMesh(id, page.answer.places, null, null), { context, dense } = view;
  const { coords } = page.answer.sensors, values = slice(page.answer.sensors.values, inputFrame()), scale = scaleOf(page.answer.sensors.values.values);
  const size = (values.length > 2000 ? 2 : 4) * dense;
  for (let i = 0; i < values.length; i++) {
    context.beginPath();
    context.arc(view.x(coords.values[2 * i]), view.y(coords.values[2 * i + 1]), size, 0, 2 * Math.PI);
    context.fillStyle = `rgb(${scale.of(values[i])})`;
    context.fill();
    context.lineWidth = dense / 2;
    context.strokeStyle = color("--muted");
    context.stroke();
  }
  drawScale(`${id}-scale`, scale);
  return view;
}

function slider(text, low, high, step, value, change) {
  const input = Object.assign(document.createElement("input"), { type: "range", min: low, max: high, step, value });
  const output = Object.assign(document.createElement("output"), { textContent: number(value) });
  input.addEventListener("input", () => {
    output.textContent = number(Number(input.value));
    change(Number(input.value));
  });
  const box = document.createElement("label");
  box.append(`${text} `, input, " ", output);
  return box;
}

function button(text, action) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  made.addEventListener("click", action);
  return made;
}

async function another() {
  page.index = (page.index ?? 0) + 1;
  try {
    page.state = await ask(place("draw"), { index: page.index });
  } catch (error) {
    say(error.message, true);
    return;
  }
  fillTools();
  refresh();
}

const curve = {
  modes: { bend: "bend the curve", ...SENSOR_MODES },
  keys: "Left and right arrows move the mark, up and down bend the curve there.",
  tools: () => [button("Random curve", another), button("One wave", () => curve.wave())],
  wave() {
    page.state.values = page.state.values.map((_, i, all) => Number(Math.sin((2 * Math.PI * i) / all.length).toFixed(5)));
    refresh();
  },
  top: () => roundedUp(Math.max(1, largest(page.state.values))),
  box: () => [0, 1, -curve.top(), curve.top()],
  act(mode, [x, y]) {
    if (mode !== "bend") return false;
    const { values } = page.state, n = values.length;
    values.forEach((value, i) => {
      const gap = Math.abs(i / n - x), d = Math.min(gap, 1 - gap);
      values[i] = Number(clamp(value + Math.exp(-((d / 0.045) ** 2) / 2) * (y - value), -4, 4).toFixed(5));
    });
    return true;
  },
  arrow([dx, dy]) {
    if (!dy) return false;
    const { values } = page.state, [x] = page.cursor;
    return curve.act("bend", [x, values[Math.round(x * values.length) % values.length] + 0.1 * dy]);
  },
  draw() {
    const { values } = page.state, view = drawLines("input", [{ values, stroke: "--input" }], curve.top());
    const { coords, values: seen } = page.answer.sensors, { context, dense } = view;
    context.fillStyle = color("--solution");
    for (let i = 0; i < seen.shape[1]; i++) {
      context.beginPath();
      context.arc(view.x(coords.values[i]), view.y(seen.values[i]), (seen.shape[1] > 300 ? 1.5 : 3) * dense, 0, 2 * Math.PI);
      context.fill();
    }
    $("input-scale").replaceChildren();
    drawCursor(view);
  },
};

const medium = {
  modes: { high: "paint the open phase", low: "paint the tight phase", ...SENSOR_MODES },
  tools: () => [button("Random medium", another), button("All open", () => medium.fill("1")), button("All tight", () => medium.fill("0"))],
  fill(phase) {
    page.state.cells = phase.repeat(page.state.cells.length);
    refresh();
  },
  box: () => UNIT,
  act(mode, [x, y]) {
    if (mode !== "high" && mode !== "low") return false;
    const { side } = page.model.play, cells = [...page.state.cells], phase = mode === "high" ? "1" : "0";
    for (let i = 0; i < side; i++) {
      for (let j = 0; j < side; j++) {
        if (Math.hypot((i + 0.5) / side - x, (j + 0.5) / side - y) < BRUSH) cells[i * side + j] = phase;
      }
    }
    page.state.cells = cells.join("");
    return true;
  },
  draw: () => drawCursor(drawSensors("input")),
};

const vorticity = {
  changesFirst: true,
  modes: { stir: "stir", ...SENSOR_MODES },
  tools: () => [button("Random flow", another), button("Undo stirring", () => vorticity.undo())],
  undo() {
    page.state.vortices = [];
    refresh();
  },
  box: () => UNIT,
  // A stick that is moved leaves a vortex on either side of its way, turning against each other.
  act(mode, [x, y], before) {
    if (mode !== "stir") return false;
    const d = before ? [x - before[0], y - before[1]] : [0.02, 0], length = Math.hypot(...d);
    if (length < 0.015) return false;
    const radius = page.model.play.radius, side = [(-d[1] / length) * radius, (d[0] / length) * radius];
    const wrap = (v) => Number((((v % 1) + 1) % 1).toFixed(4)), strength = Number(Math.min(1, 12 * length).toFixed(3));
    page.state.vortices.push(
      [wrap(x + side[0]), wrap(y + side[1]), strength], [wrap(x - side[0]), wrap(y - side[1]), -strength],
    );
    page.state.vortices = page.state.vortices.slice(-400);
    return true;
  },
  draw() {
    const view = drawSensors("input");
    for (const [x, y, strength] of page.state.vortices.slice(-60)) {
      view.context.beginPath();
      view.context.arc(view.x(x), view.y(y), 3 * view.dense, 0, 2 * Math.PI);
      view.context.strokeStyle = color(strength > 0 ? "--prediction" : "--solution");
      view.context.stroke();
    }
    drawCursor(view);
  },
};

const SHAPE_NUMBERS = {
  square: [["mesh", 8, 19, 1]],
  disc: [["mesh", 8, 19, 1]],
  annulus: [["hole", 0.05, 0.25, 0.01], ["its x", 0.35, 0.65, 0.01], ["its y", 0.35, 0.65, 0.01]],
  l: [["cut width", 0.2, 0.8, 0.05], ["cut height", 0.2, 0.8, 0.05], ["corner", 0, 3, 1]],
  u: [["cut width", 0.2, 0.6, 0.05], ["cut depth", 0.2, 0.8, 0.05]],
};
const SHAPE_NAMES = { square: "square", disc: "disc", annulus: "disc with a hole", l: "L", u: "U" };

// Sources lie on the solver's nodes; those of finer meshes come after them.
function nearestNode(at) {
  const points = page.answer.places.coords.values;
  const nodes = Array.from({ length: page.answer.sensors.usual }, (_, i) => [points[2 * i], points[2 * i + 1]]);
  const nearest = nodes.reduce((best, node) => (distance(node, at) < distance(best, at) ? node : best));
  return nearest.map((x) => Number(clamp(x, -1, 2).toFixed(4)));
}

const sources = {
  modes: { source: "place or remove a source", ...SENSOR_MODES },
  tools() {
    const { play } = page.model, choice = document.createElement("select");
    for (const name of Object.keys(play.shapes)) {
      const unseen = play.trained.includes(name) ? "" : " (not in training)";
      choice.add(new Option(SHAPE_NAMES[name] + unseen, name, false, name === page.state.shape));
    }
    choice.addEventListener("change", () => {
      Object.assign(page.state, { shape: choice.value, numbers: clone(play.shapes[choice.value]) });
      resetSensors();
      fillTools();
      refresh();
    });
    const shape = document.createElement("label");
    shape.append("Shape ", choice);
    const sliders = SHAPE_NUMBERS[page.state.shape].map(([text, low, high, step], i) =>
      slider(text, low, high, step, page.state.numbers[i], (value) => {
        page.state.numbers[i] = value;
        refresh();
      }));
    const turn = slider("turn", -180, 180, 5, page.state.turn, (value) => {
      page.state.turn = value;
      refresh();
    });
    return [shape, ...sliders, turn, button("Random", another), button("No sources", () => sources.clear())];
  },
  clear() {
    page.state.sources = [];
    refresh();
  },
  box: () => boxOf(page.answer.places),
  act(mode, at, before) {
    if (mode !== "source" || before) return false; // one for each click, none on the way
    const kept = page.state.sources.filter((other) => distance(other, at) > BRUSH);
    page.state.sources = kept.length < page.state.sources.length ? kept : [...kept, nearestNode(at)].slice(-20);
    return true;
  },
  draw() {
    const view = drawNodes("input");
    for (const [x, y] of page.state.sources) {
      view.context.beginPath();
      view.context.arc(view.x(x), view.y(y), (0.0707 * view.canvas.width) / (view.box[1] - view.box[0]), 0, 2 * Math.PI);
      view.context.lineWidth = 2 * view.dense;
      view.context.strokeStyle = color("--prediction");
      view.context.stroke();
    }
    drawCursor(view);
  },
};

const stream = {
  modes: SENSOR_MODES,
  tools() {
    const { play } = page.model;
    return ["mach", "angle"].map((name, i) => {
      // Stops whose first frames come with the package are answered at once; without any, all values are solved.
      const stops = [...new Set(play.ready.map((pair) => pair[i]))].sort((a, b) => a - b);
      const step = stops.length > 1 ? Number((stops[1] - stops[0]).toFixed(6)) : i ? 1 : 0.01;
      const [low, high] = stops.length > 1 ? [stops[0], stops.at(-1)] : play[name];
      return slider(name === "mach" ? "Mach number" : "angle of attack", low, high, step, page.state[name], (value) => {
        page.state[name] = Number(value.toFixed(6));
        refresh();
      });
    });
  },
  box: () => boxOf(page.answer.places),
  act: () => false,
  draw: () => drawCursor(drawNodes("input")),
};

const SCENES = { curve, medium, vorticity, sources, stream };
const tools = () => SCENES[page.model.play.kind];

function drawCursor(view) {
  if (document.activeElement !== $("input")) return;
  const { context, dense } = view;
  const [x, y] = [view.x(page.cursor[0]), page.cursor.length > 1 && page.answer.places.kind !== "line" ? view.y(page.cursor[1]) : view.canvas.height / 2];
  context.strokeStyle = color("--focus");
  context.lineWidth = 2 * dense;
  context.beginPath();
  context.moveTo(x, page.answer.places.kind === "line" ? 0 : y - 9 * dense);
  context.lineTo(x, page.answer.places.kind === "line" ? view.canvas.height : y + 9 * dense);
  if (page.answer.places.kind !== "line") {
    context.moveTo(x - 9 * dense, y);
    context.lineTo(x + 9 * dense, y);
  }
  context.stroke();
}

// ---- pointer and keyboard

function resetSensors() {
  page.sensors = { stride: Number($("stride").value), share: Number($("share").value) / 100, seed: 0, erased: [], added: [] };
}

// All sensors of training and the usual resolution, or what is left of them for an answer at once.
function setEffort({ stride, share, resolution }) {
  $("stride").value = stride;
  setShare(share);
  $("resolution").value = page.resolution = resolution;
  Object.assign(page.sensors, { stride, share });
}

function setShare(share) {
  $("share").value = 100 * share;
  $("share-text").textContent = `${$("share").value} %`;
}

const fullEffort = () => ({ stride: 1, share: 1, resolution: page.model.play.resolution });
const atStart = () => page.sensors.stride === page.model.play.start.stride && page.sensors.share === page.model.play.start.share && page.resolution === page.model.play.start.resolution;

function perAxis(stride) {
  return Math.ceil((page.model.spec.grid?.[0] ?? 1) / stride);
}

const gridText = (n) => Array(page.model.spec.dim).fill(n).join(" × ");

// What is left out, and the way to the whole of it.
function drawQuick() {
  const { start } = page.model.play, { answer } = page;
  $("quick").hidden = !start.reduced;
  if (!start.reduced || answer.draft) return;
  const fewer = start.stride > 1 ? `${gridText(perAxis(start.stride))} of the ${gridText(perAxis(1))}` : percent(start.share);
  const seen = start.stride > 1 || start.share < 1 ? `sees ${fewer} sensors of training, with which it may be less accurate, and ` : "";
  const where = page.model.spec.grid === null ? "the nodes" : `${gridText(start.resolution)} points`;
  if (atStart()) page.pace = answer.seconds.prediction / start.operations;
  const takes = page.pace ? `, about ${milliseconds(page.pace * start.full)}` : "";
  $("quick-text").textContent = atStart() ? `To answer at once, the operator ${seen}is asked at ${where}.` : "";
  $("full").textContent = atStart() ? `All points${takes}` : "Answer at once again";
}

function act(at, before) {
  const width = tools().box()[1] - tools().box()[0], dim = page.model.spec.dim, { sensors } = page;
  const where = at.slice(0, dim).map((x) => Number(x.toFixed(5)));
  if (page.mode === "erase") {
    sensors.erased = [...sensors.erased, [...where, BRUSH * width]].slice(-500);
    sensors.added = sensors.added.filter((other) => distance(other, where) >= BRUSH * width);
  } else if (page.mode === "add") {
    if (before) return;
    sensors.added = [...sensors.added, where].slice(-500);
  } else if (!tools().act(page.mode, at, before)) {
    return;
  }
  tools().draw();
  refresh();
}

function pointed(event) {
  const canvas = $("input"), frame = canvas.getBoundingClientRect(), [left, right, bottom, top] = tools().box();
  const x = (event.clientX - frame.left - canvas.clientLeft) / canvas.clientWidth;
  const y = (event.clientY - frame.top - canvas.clientTop) / canvas.clientHeight;
  return [left + clamp(x, 0, 1) * (right - left), top - clamp(y, 0, 1) * (top - bottom)];
}

const pointer = { last: null };

function listen() {
  const canvas = $("input");
  canvas.addEventListener("pointerdown", (event) => {
    if (!page.answer) return;
    canvas.setPointerCapture(event.pointerId);
    page.cursor = pointer.last = pointed(event);
    act(page.cursor, null);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointer.last) return;
    const at = pointed(event);
    const count = page.mode === "stir" ? 1 : 4; // steps between two events, so that a quick stroke has no gaps
    for (let k = 1; k <= count; k++) act(at.map((x, i) => pointer.last[i] + ((x - pointer.last[i]) * k) / count), pointer.last);
    if (page.mode !== "stir" || distance(at, pointer.last) >= 0.015) pointer.last = at;
    page.cursor = at;
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => {
      pointer.last = null;
      if (page.answer?.draft) refresh();
    });
  }
  for (const change of ["focus", "blur"]) canvas.addEventListener(change, () => page.answer && draw());
  canvas.addEventListener("keydown", (event) => {
    if (!page.answer) return;
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (event.key in arrows) {
      event.preventDefault();
      const [dx, dy] = arrows[event.key], box = tools().box();
      if (page.mode === "bend" && tools().arrow([dx, dy])) {
        refresh();
        return;
      }
      const before = page.cursor, step = (event.shiftKey ? 0.1 : 0.02) * (box[1] - box[0]);
      page.cursor = [clamp(before[0] + dx * step, box[0], box[1]), clamp(before[1] + dy * step, box[2], box[3])];
      if (page.mode === "stir" && event.ctrlKey) act(page.cursor, before);
      draw();
    } else if (event.key === " " || event.key === "Enter") {
      event.preventDefault();
      act(page.cursor, null);
    }
  });
  $("share").addEventListener("input", () => {
    page.sensors.share = Number($("share").value) / 100;
    setShare(page.sensors.share);
    refresh();
  });
  $("sensors-reset").addEventListener("click", () => {
    $("stride").value = 1;
    setShare(1);
    resetSensors();
    refresh();
  });
  $("stride").addEventListener("change", () => {
    page.sensors.stride = Number($("stride").value);
    refresh();
  });
  $("full").addEventListener("click", () => {
    setEffort(atStart() ? fullEffort() : page.model.play.start);
    refresh();
  });
  $("resolution").addEventListener("change", () => {
    page.resolution = Number($("resolution").value);
    refresh();
  });
  $("channel").addEventListener("change", () => {
    page.channel = Number($("channel").value);
    refresh();
  });
  $("compare").addEventListener("change", () => {
    $("solve").hidden = !($("compare").checked && page.model.play.slow);
    forgetSolution();
    draw();
    if ($("compare").checked && !page.model.play.slow) solveSoon();
  });
  $("solve").addEventListener("click", solve);
  $("frame").addEventListener("input", () => {
    page.frame = Number($("frame").value);
    draw();
  });
  $("run").addEventListener("click", () => run(!running));
  $("model").addEventListener("change", () => choose($("model").value));
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

let running = 0;

function run(wanted) {
  clearInterval(running);
  running = wanted && setInterval(() => {
    page.frame = page.frame >= Number($("frame").max) ? 0 : page.frame + 1;
    draw();
  }, 150);
  $("run").textContent = wanted ? "Stop" : "Run";
  $("run").setAttribute("aria-pressed", String(Boolean(wanted)));
}

// ---- choosing an operator

function fillTools() {
  $("state-tools").replaceChildren(...tools().tools());
}

function fillPointer() {
  const legend = $("pointer").querySelector("legend");
  const choices = Object.entries(tools().modes).map(([mode, text], i) => {
    const radio = Object.assign(document.createElement("input"), { type: "radio", name: "mode", value: mode, checked: !i });
    radio.addEventListener("change", () => (page.mode = mode));
    const box = document.createElement("label");
    box.append(radio, ` ${text}`);
    return box;
  });
  [page.mode] = Object.keys(tools().modes);
  $("pointer").replaceChildren(legend, ...choices);
  $("keys").textContent = `Keyboard, on the input picture: ${tools().keys ?? "arrows move the mark (with Shift, further)."} Space or Enter does there what the pointer would${page.model.play.kind === "vorticity" ? "; with Ctrl, arrows stir" : ""}.`;
}

function fillChoices() {
  const { play, targets, spec, picture } = page.model;
  const text = (n) => spec.grid === null
    ? ["the solver's nodes", "nodes of a mesh twice as fine", "nodes of a mesh four times as fine"][n - 1]
    : `${gridText(n)} points`;
  $("stride").replaceChildren(...play.strides.map((n) => new Option(`${gridText(perAxis(n))}${n === 1 ? ", as in training" : ""}`, n)));
  $("stride-label").hidden = play.strides.length < 2;
  $("resolution").replaceChildren(...play.resolutions.map((n) => new Option(text(n), n)));
  $("channel").replaceChildren(...targets.map((name, i) => new Option(name, i, false, i === picture.target)));
  $("channel-label").hidden = targets.length < 2;
  page.channel = picture.target;
  resetSensors();
  setEffort(play.start);
  page.pace = 0;
  $("solve").hidden = !($("compare").checked && play.slow);
}

// What to expect: the errors on the test samples (or those held out for validation), as the card has them.
function tested({ error, scored, squares, targets, play }) {
  if (error === null) return "";
  const which = play?.tested ? `; ${scored} samples (${play.tested})` : `, ${scored}`;
  if (!squares || targets.length < 2) return `${which} error ${percent(error)}`;
  const each = targets.map((name, i) => `${name} ${(1000 * squares[i]).toPrecision(3)}`).join(", ");
  return `${which}: squared error, scaled, × 10⁻³: ${each}; relative L2 ${percent(error)}`;
}

async function choose(name) {
  run(false);
  forgetSolution();
  say("Loading…");
  const choice = (live.choosing += 1);
  try {
    const model = await ask(`v1/models/${encodeURIComponent(name)}`);
    const state = model.play ? await ask(`v1/models/${encodeURIComponent(name)}/draw`, { index: 0 }) : null;
    if (choice !== live.choosing) return; // another was chosen since
    Object.assign(page, { model, state, answer: null, index: 0, frame: model.spec.in_times, cursor: [0.5, 0.5] });
    $("about").textContent = `${model.title}: ${model.parameters.toLocaleString()} parameters, ${model.steps.toLocaleString()} training steps${tested(model)}`;
    $("story").textContent = model.text;
    for (const part of ["tools", "panels", "numbers"]) $(part).hidden = !model.play;
    if (!model.play) {
      say("");
      $("about").textContent += ". It was trained on data alone: there is no problem here to play with. Ask it over HTTP.";
      $("time").hidden = true;
      return;
    }
    page.frame = model.spec.in_times;
    fillChoices();
    fillTools();
    fillPointer();
    label("input", `Input: ${model.inputs[model.picture.input]}. Drawn and changed with pointer or keyboard.`);
    await refresh();
  } catch (error) {
    say(error.message, true);
  } finally {
    if (choice === live.choosing) live.choosing = 0;
  }
}

async function start() {
  listen();
  try {
    const { models } = await ask("v1/models");
    $("model").replaceChildren(...models.map((model) => new Option(model.name, model.name)));
    const playable = models.find((model) => model.scene) ?? models[0];
    $("model").value = playable.name;
    await choose(playable.name);
  } catch (error) {
    say(error.message, true);
  }
}

start();
