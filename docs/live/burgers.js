// Burgers' equation in the page: u_t + (u^2/2)_x = nu u_xx on a periodic line, its random initial states, and what
// sensors see of a curve. The same mathematics as solvers/burgers_spectral.py, solvers/random_fields.py and
// playground/scenes/burgers.py; tests/test_live.py holds each against its Python.
//
// Curves are spectra: the real and imaginary parts of the c_k of u(x) = sum over all k of c_k exp(2 pi i k x), with
// c_-k the conjugate of c_k, so that k = 0, 1, ... say all.

// The trigonometric interpolant of values on the points j/n. At the Nyquist frequency of an even grid it is a cosine.
export function spectrumOf(values) {
  const n = values.length, modes = Math.floor(n / 2) + 1, re = new Float64Array(modes), im = new Float64Array(modes);
  for (let k = 0; k < modes; k++) {
    for (let j = 0; j < n; j++) {
      const angle = (-2 * Math.PI * ((k * j) % n)) / n;
      re[k] += (values[j] * Math.cos(angle)) / n;
      im[k] += (values[j] * Math.sin(angle)) / n;
    }
  }
  if (n % 2 === 0) [re[modes - 1], im[modes - 1]] = [re[modes - 1] / 2, 0]; // shared between +n/2 and -n/2
  return { re, im };
}

// Its values at x = row/points; by default at all of them.
export function valuesOf({ re, im }, points, rows = Array.from({ length: points }, (_, row) => row)) {
  const cos = new Float64Array(points), sin = new Float64Array(points);
  for (let j = 0; j < points; j++) {
    cos[j] = Math.cos((2 * Math.PI * j) / points);
    sin[j] = Math.sin((2 * Math.PI * j) / points);
  }
  return Float64Array.from(rows, (row) => {
    let sum = re[0];
    for (let k = 1; k < re.length; k++) {
      const at = (k * row) % points;
      sum += 2 * (re[k] * cos[at] - im[k] * sin[at]);
    }
    return sum;
  });
}

// ---- random curves

// Standard normal numbers, by Box and Muller.
export const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());

// A Gaussian random field with the law sigma^2 (-Laplacian + tau^2)^(-alpha) on the unit line, of the modes 1, 2, ...
export function randomCurve({ law, modes }, noise = normal) {
  const re = new Float64Array(modes + 1), im = new Float64Array(modes + 1);
  for (let k = 1; k <= modes; k++) {
    const deviation = law.amplitude * ((2 * Math.PI * k) ** 2 + law.inverse_length ** 2) ** (-law.exponent / 2);
    re[k] = (deviation * noise()) / Math.SQRT2;
    im[k] = (-deviation * noise()) / Math.SQRT2;
  }
  return { re, im };
}

// ---- sensors

const ranks = []; // of the usual sensors; drawn once, so that a share of them stays the same while a curve is bent

// The rows of a grid that are seen: a share of the usual ones, less what is erased, and the nearest to each added.
export function sensorRows({ share, erased, added, stride = 1 }, points, grid) {
  const usual = grid / stride;
  while (ranks.length < usual) ranks.push(Math.random());
  const first = Array.from({ length: usual }, (_, i) => i).sort((i, j) => ranks[i] - ranks[j]);
  let rows = first.slice(0, Math.max(1, Math.round(share * usual))).map((i) => (i * points) / usual);
  for (const [center, radius] of erased) rows = rows.filter((row) => Math.abs(row / points - center) >= radius);
  for (const [x] of added) rows.push(Math.min(Math.max(Math.round(x * points), 0), points - 1));
  return [...new Set(rows)].sort((a, b) => a - b);
}

// Quadrature weights: each weighs the half-gaps to its neighbors, around the period; they sum to one.
export function sensorWeights(rows, points) {
  const n = rows.length;
  if (n === 1) return [1];
  return rows.map((row, i) => {
    const before = i ? rows[i - 1] : rows[n - 1] - points, after = i < n - 1 ? rows[i + 1] : rows[0] + points;
    return (after - before) / 2 / points;
  });
}

// ---- the solver

// Complex Fourier transforms of 2^m numbers in place, without a factor; `sign` is that of the exponent.
function transforms(n) {
  const cos = new Float64Array(n / 2), sin = new Float64Array(n / 2), reversed = new Uint32Array(n);
  for (let j = 0; j < n / 2; j++) {
    cos[j] = Math.cos((2 * Math.PI * j) / n);
    sin[j] = Math.sin((2 * Math.PI * j) / n);
  }
  for (let j = 1; j < n; j++) reversed[j] = (reversed[j >> 1] >> 1) | (j & 1 ? n >> 1 : 0);
  return (re, im, sign) => {
    for (let j = 0; j < n; j++) {
      const k = reversed[j];
      if (j < k) {
        [re[j], re[k]] = [re[k], re[j]];
        [im[j], im[k]] = [im[k], im[j]];
      }
    }
    for (let half = 1; half < n; half *= 2) {
      const stride = n / (2 * half);
      for (let first = 0; first < n; first += 2 * half) {
        for (let j = 0; j < half; j++) {
          const a = first + j, b = a + half, c = cos[j * stride], s = sign * sin[j * stride];
          const x = re[b] * c - im[b] * s, y = re[b] * s + im[b] * c;
          re[b] = re[a] - x;
          im[b] = im[a] - y;
          re[a] += x;
          im[a] += y;
        }
      }
    }
  };
}

// How many points the solver takes: the problem's own number, or the next power of two, which the transform wants.
export const solverPoints = ({ solver_points: wanted }) => 2 ** Math.ceil(Math.log2(wanted));

// The spectrum of the solution at the end. Pseudo-spectral: the 2/3 rule keeps the modes k < n/3, on which the product
// is free of aliasing; diffusion is integrated exactly and the rest by classical Runge-Kutta (integrating-factor RK4).
export function solve(initial, problem) {
  const { viscosity, length, duration, steps } = problem, n = solverPoints(problem), kept = Math.ceil(n / 3), dt = duration / steps;
  const transform = transforms(n), wave = (2 * Math.PI) / length;
  const half = Float64Array.from({ length: kept }, (_, k) => Math.exp((-viscosity * (k * wave) ** 2 * dt) / 2));
  const re = new Float64Array(n), im = new Float64Array(n);
  const empty = () => ({ re: new Float64Array(kept), im: new Float64Array(kept) });

  // -(u^2/2)_x over a whole step, into `out`.
  function advect(v, out) {
    re.fill(0);
    im.fill(0);
    re[0] = v.re[0];
    for (let k = 1; k < kept; k++) {
      re[k] = re[n - k] = v.re[k];
      im[k] = v.im[k];
      im[n - k] = -v.im[k];
    }
    transform(re, im, 1);
    for (let j = 0; j < n; j++) re[j] *= re[j];
    im.fill(0);
    transform(re, im, -1);
    for (let k = 0; k < kept; k++) {
      const push = (-k * wave * dt) / (2 * n);
      out.re[k] = -push * im[k];
      out.im[k] = push * re[k];
    }
  }

  // out = factor (x + weight y), where the factor of mode k is that of half a step's diffusion, or one.
  function combine(out, x, weight, y, diffused) {
    for (let k = 0; k < kept; k++) {
      const factor = diffused ? half[k] : 1;
      out.re[k] = factor * (x.re[k] + weight * y.re[k]);
      out.im[k] = factor * (x.im[k] + weight * y.im[k]);
    }
  }

  const v = empty(), a = empty(), b = empty(), c = empty(), d = empty(), at = empty();
  v.re.set(initial.re.subarray(0, kept));
  v.im.set(initial.im.subarray(0, kept));
  for (let step = 0; step < steps; step++) {
    advect(v, a);
    combine(a, a, 0, a, true);
    combine(v, v, 0, v, true);
    combine(at, v, 0.5, a, false);
    advect(at, b);
    combine(at, v, 0.5, b, false);
    advect(at, c);
    combine(at, v, 1, c, true);
    advect(at, d);
    for (let k = 0; k < kept; k++) {
      v.re[k] = half[k] * (v.re[k] + (a.re[k] + 2 * (b.re[k] + c.re[k])) / 6) + d.re[k] / 6;
      v.im[k] = half[k] * (v.im[k] + (a.im[k] + 2 * (b.im[k] + c.im[k])) / 6) + d.im[k] / 6;
    }
  }
  if (![...v.re, ...v.im].every(Number.isFinite)) throw new Error("The solver left the finite numbers: this curve is too steep for its time step.");
  return v;
}
