// A mixture's part of the strip: of each layer the experts that tokens went to of late, and the cache's hits.

const FADE = 0.85; // what a report counts after the next one
const PICTURE_PX = 112, LEAST_PX = 56; // of all experts of a layer
const EXPERT_PX = 10; // of one, where they are few
const HITS_PX = 10;
const ABOUT = "layers left to right, an expert in each row";

let tokens = 0; // of late, as `heat` counts them
let heat = []; // of each layer, of each expert: tokens that went to it of late; null without experts
let found = []; // of each layer: the share of needed experts that were in memory; null: all are

export const some = (layers) => layers.some((layer) => layer.experts);

/** Takes in a report that has layers. */
export function take({ tokens: now, layers }) {
  const fits = heat.length === layers.length && heat.every((h, i) => h?.length === layers[i].experts?.n);
  if (!fits) {
    tokens = 0;
    heat = layers.map((layer) => (layer.experts ? new Float64Array(layer.experts.n) : undefined));
  }
  tokens = FADE * tokens + now;
  layers.forEach((layer, i) => {
    if (!heat[i]) return;
    heat[i].forEach((x, e) => { heat[i][e] = FADE * x; });
    for (const [e, n] of layer.experts.used) heat[i][e] += n;
  });
  found = layers.map((layer) => layer.experts?.hit_rate ?? null);
}

const percent = (share) => `${Math.round(100 * share)} %`;

/** Returns the experts in words, for the line above the picture. */
export function words(layers) {
  const mixed = layers.filter((layer) => layer.experts);
  if (!mixed.length) return [];
  const used = mixed.reduce((sum, layer) => sum + layer.experts.n_used, 0) / mixed.length;
  return [`${Math.round(used)} of ${mixed[0].experts.n} experts in use`];
}

export function label(layers) {
  const mixed = layers.map((layer) => layer.experts).filter(Boolean);
  const rates = mixed.map((e) => e.hit_rate).filter((rate) => rate !== null);
  const hits = rates.length ? `. Found in memory: ${rates.map(percent).join(", ")}` : "";
  return `Experts in use by layer: ${mixed.map((e) => `${e.n_used} of ${e.n}`).join(", ")}${hits}`;
}

export const about = () => (fromDisk() ? `${ABOUT}; below, the share not in memory` : ABOUT);

const most = () => Math.max(1, ...heat.map((h) => h?.length ?? 0));
const picture = () => Math.min(PICTURE_PX, Math.max(LEAST_PX, most() * EXPERT_PX));
const fromDisk = () => found.some((rate) => rate !== null);

export const height = () => picture() + (fromDisk() ? HITS_PX + 3 : 0);

/** Draws a column for each layer: its experts, and below them how many were found in memory. */
export function draw(g, width, colour) {
  const step = width / heat.length;
  const gap = step > 6 ? 1 : 0;
  const high = picture();
  heat.forEach((layer, i) => {
    if (!layer) return;
    g.fillStyle = colour(0);
    g.fillRect(i * step, 0, step - gap, high);
    const each = high / layer.length;
    layer.forEach((n, e) => {
      const share = n / tokens;
      if (share < 0.005) return;
      // A few experts get most tokens; by a root the others are seen too.
      g.fillStyle = colour(0.15 + 0.85 * Math.sqrt(share));
      g.fillRect(i * step, e * each, step - gap, Math.max(1, each - (each > 4 ? 1 : 0)));
    });
    if (found[i] === null) return;
    g.fillStyle = colour(0);
    g.fillRect(i * step, high + 3, step - gap, HITS_PX);
    g.fillStyle = colour(1);
    g.fillRect(i * step, high + 3, (step - gap) * (1 - found[i]), HITS_PX); // as wide as what was missed
  });
}

/** Returns what is at a place of the picture, in words, or null. */
export function at(x, y, canvas) {
  const i = Math.floor((x / canvas.clientWidth) * heat.length);
  const layer = heat[i];
  if (!layer) return null;
  if (y > picture()) return found[i] === null ? null : `layer ${i}: ${percent(found[i])} found in memory`;
  const e = Math.min(layer.length - 1, Math.floor((y / picture()) * layer.length));
  return `layer ${i}, expert ${e}: ${percent(layer[e] / tokens)} of tokens`;
}
