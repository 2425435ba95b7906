// The playground's page asks a service; here a worker is that service. Loaded before app.js, which stays as it is.

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const waiting = new Map(); // what resolves a request, by its number
const overHttp = globalThis.fetch;
const answer = (content, status) => new Response(JSON.stringify(content), { status });
const refusal = () => answer({ error: "The operator could not be started here. It needs a browser with WebAssembly and modules in workers." }, 500);
let count = 0, failed = false;

worker.addEventListener("message", ({ data: { id, status, content } }) => {
  waiting.get(id)(answer(content, status));
  waiting.delete(id);
});
// A worker that cannot be started, in an old browser or without one of its files, would leave requests without an answer.
worker.addEventListener("error", () => {
  failed = true;
  for (const resolve of waiting.values()) resolve(refusal());
  waiting.clear();
});

globalThis.fetch = (path, settings = {}) => {
  if (!String(path).startsWith("v1/")) return overHttp(path, settings);
  return new Promise((resolve, reject) => {
    if (failed) return resolve(refusal());
    const id = (count += 1);
    settings.signal?.addEventListener("abort", () => reject(settings.signal.reason));
    waiting.set(id, resolve);
    worker.postMessage({ id, path, body: settings.body });
  });
};
