// What `oformer serve` answers on another machine, answered beside the page: the operators as ONNX in onnxruntime-web,
// Burgers' equation in burgers.js. One message is one request, answered in order; requests and answers are those of
// playground/api.py, so that the page cannot tell the difference.

import * as ort from "./ort.js";
import * as burgers from "./burgers.js";

const beside = (name) => new URL(name, import.meta.url).href;

ort.env.wasm.wasmPaths = { wasm: beside("ort.wasm") };
ort.env.wasm.numThreads = 1; // more would want headers that plain static servers do not send
ort.env.logLevel = "error";

const models = fetch(beside("models.json")).then((response) => response.json());
const sessions = new Map(); // by name, made when first asked for

function session(name) {
  if (!sessions.has(name)) {
    const made = ort.InferenceSession.create(beside(`${name}.onnx`), { logSeverityLevel: 3 });
    made.catch(() => sessions.delete(name)); // the network may be back when it is asked for again
    sessions.set(name, made);
  }
  return sessions.get(name);
}

function encoded(values, shape) {
  const bytes = new Uint8Array(Float32Array.from(values).buffer);
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return { type: "float32", shape, base64: btoa(text) };
}

const rounded = (values) => Array.from(values, (value) => Number(Math.min(Math.max(value, -4), 4).toFixed(5)));
const gridOf = (points) => Float32Array.from({ length: points }, (_, i) => i / points);

// What of a curve no training sample had: their law has no mode 0, and an operator that learned from them ignores it.
function newIn(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return Math.abs(mean) < 0.005 ? "" : `a mean of ${Number(mean.toPrecision(3))}, where all curves of training have mean zero`;
}

const ACTIONS = {
  draw: ({ problem, play }) => ({ values: rounded(burgers.valuesOf(burgers.randomCurve(problem), play.state.properties.values.minItems)) }),

  async play(model, { state, resolution, sensors }) {
    const operator = await session(model.name), start = performance.now();
    const { points } = model.problem, [usual] = model.spec.grid, rows = burgers.sensorRows(sensors, points, usual);
    if (!rows.length) throw new Error("Expected at least one sensor, got none. Add one, or erase fewer.");
    const n = rows.length, coords = Float32Array.from(rows, (row) => row / points);
    const values = burgers.valuesOf(burgers.spectrumOf(state.values), points, rows);
    const tensor = (data, ...shape) => new ort.Tensor("float32", Float32Array.from(data), shape);
    const known = {
      coords: tensor(coords, 1, n, 1),
      values: tensor(values, 1, 1, n, 1),
      weights: tensor(burgers.sensorWeights(rows, points), 1, n),
      query_coords: tensor(gridOf(resolution), 1, resolution, 1),
      query_weights: tensor(new Float32Array(resolution).fill(1 / resolution), 1, resolution),
    };
    const feed = Object.fromEntries(operator.inputNames.map((name) => [name, known[name]]));
    const before = performance.now(), { answer } = await operator.run(feed), after = performance.now();
    return {
      sensors: { coords: encoded(coords, [n, 1]), values: encoded(values, [1, n]), usual },
      places: { kind: "line", points: resolution },
      prediction: encoded(answer.data, [1, resolution]),
      seconds: { input: (before - start) / 1000, prediction: (after - before) / 1000 },
      unseen: newIn(state.values),
    };
  },

  solve(model, { state, resolution }) {
    const start = performance.now(), final = burgers.solve(burgers.spectrumOf(state.values), model.problem);
    const solution = encoded(burgers.valuesOf(final, resolution), [1, resolution]);
    const solver = `Fourier method, ${burgers.solverPoints(model.problem)} points, ${model.problem.steps} steps, float64`;
    return { solution, seconds: (performance.now() - start) / 1000, solver };
  },
};

async function answered(path, body) {
  const [, , name, action] = path.split("/").map(decodeURIComponent); // v1/models/NAME/ACTION
  const all = await models;
  if (name === undefined) return { models: all };
  const model = all.find((other) => other.name === name);
  if (action !== undefined) return ACTIONS[action](model, JSON.parse(body));
  await session(name); // so that the page says "Loading" while it does
  return model;
}

let last = Promise.resolve();

self.addEventListener("message", ({ data: { id, path, body } }) => {
  last = last
    .then(() => answered(path, body))
    .then((content) => ({ status: 200, content }), (error) => ({ status: 422, content: { error: error.message } }))
    .then((answer) => self.postMessage({ id, ...answer }));
});
