// The live strip: which neurons of each layer, or which experts, are active while an answer grows.

import { activity } from "./api.js";
import { $ } from "./dom.js";
import * as experts from "./experts.js";

const ROWS = 12; // reports shown: the latest large on top, older ones below
const NOW_PX = 26, ROW_PX = 4;
const TOPS = [0.02, 0.05, 0.1, 0.2, 0.5, 1]; // shares that the hottest colour can stand for
const LINGER_MS = 700; // the last report comes after the last token

let reports = [];
let watching = null;

/** Shows a model's activity until the returned function is called. Errors are ignored. */
export function watch(model) {
  watching?.abort();
  const mine = watching = new AbortController();
  follow(model, mine.signal).catch(() => {});
  return () => setTimeout(() => mine.abort(), LINGER_MS);
}

async function follow(model, signal) {
  for await (const report of activity(model, signal)) take(report);
}

/** Shows a report. */
export function take(report) {
  $("strip-text").textContent = words(report);
  if (report.layers) {
    if (reports[0]?.length !== report.layers.length) reports = []; // of another model
    reports = [report.layers, ...reports].slice(0, ROWS);
    experts.take(report);
  }
  $("strip").hidden = false;
  draw();
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const mean = (layers, key) => layers.reduce((sum, layer) => sum + layer[key], 0) / layers.length;
const speed = (x) => (x >= 100 ? Math.round(x) : Number(x.toPrecision(2)));

/** Returns the report in words, for the line above the picture and for screen readers. */
export function words(report) {
  const said = [`${Math.round(report.tokens_per_s * 10) / 10} tok/s`];
  if (report.layers?.length) {
    const [active, computed, asked] = ["active", "computed", "asked"].map((key) => mean(report.layers, key));
    said.push(...experts.words(report.layers));
    said.push(`${percent(active)} of neurons active`);
    if (percent(computed) !== percent(active)) said.push(`${percent(computed)} computed`);
    if (asked < 1 && !experts.some(report.layers)) said.push(`gates of ${percent(asked)} read`);
  }
  const { gpu, ram, disk } = report.tiers;
  if (gpu) said.push(gpu.gb_per_s === null ? `GPU and RAM ${speed(report.gb_per_s)} GB/s`
    : `GPU ${speed(gpu.gb_per_s)} GB/s`);
  if (ram && ram.gb_per_s !== null) said.push(`RAM ${speed(ram.gb_per_s)} GB/s`);
  if (disk) {
    const hits = disk.hit_rate === null ? "" : `, ${percent(disk.hit_rate)} found in memory`;
    said.push(`disk ${speed(disk.gb_per_s)} GB/s${hits}`);
  }
  return said.join(" · ");
}

// ---- the picture

/** Returns the colours of the legend, which the theme defines. */
function ramp() {
  return ["cold", "cool", "warm", "hot"].map((name) => {
    const swatch = document.querySelector(`.scale .${name}`);
    return getComputedStyle(swatch).backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number);
  });
}

function colour(colours, share) {
  const at = Math.min(1, Math.max(0, share)) * (colours.length - 1);
  const low = Math.min(colours.length - 2, Math.floor(at));
  return colours[low].map((c, i) => Math.round(c + (colours[low + 1][i] - c) * (at - low)));
}

/** Returns the canvas's context for a picture of this height, in pixels of the page. */
function sized(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  return [g, width];
}

export function draw() {
  const canvas = $("strip-picture");
  canvas.hidden = !reports.length;
  document.querySelector("#strip .legend").hidden = !reports.length;
  if (!reports.length || !canvas.clientWidth) return;
  const colours = ramp();
  const mixture = experts.some(reports[0]);
  $("strip-about").textContent = mixture ? experts.about() : "layers left to right, now on top";
  $("strip-of").textContent = mixture ? "of tokens, of late" : "of a layer’s neurons active";
  if (mixture) {
    $("strip-top").textContent = "100 %";
    canvas.setAttribute("aria-label", experts.label(reports[0]));
    const [g, width] = sized(canvas, experts.height());
    experts.draw(g, width, (share) => `rgb(${colour(colours, share)})`);
    return;
  }
  const most = Math.max(...reports.flat().map((layer) => layer.active));
  const top = TOPS.find((t) => t >= most) ?? 1;
  $("strip-top").textContent = `${100 * top} %`;
  const shares = reports[0].map((layer) => percent(layer.active)).join(", ");
  canvas.setAttribute("aria-label", `Active neurons by layer: ${shares}`);
  const [g, width] = sized(canvas, NOW_PX + 2 + ROW_PX * (ROWS - 1));
  reports.forEach((layers, row) => {
    const y = row ? NOW_PX + 2 + ROW_PX * (row - 1) : 0;
    cells(g, layers, y, row ? ROW_PX : NOW_PX, width, (layer) => colour(colours, layer.active / top));
  });
}

/** Draws the row of one report, a column for each layer. The latest row has labels if they fit. */
function cells(g, layers, y, height, width, of) {
  const step = width / layers.length;
  const gap = step > 6 ? 1 : 0;
  layers.forEach((layer, i) => {
    const rgb = of(layer);
    g.fillStyle = `rgb(${rgb})`;
    g.fillRect(i * step, y, step - gap, height);
    if (height < NOW_PX || step < 44) return;
    const dark = 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2] < 130;
    g.fillStyle = dark ? "#fff" : "#10202a";
    g.font = "12px system-ui, sans-serif";
    g.textAlign = "center";
    g.textBaseline = "middle";
    g.fillText(percent(layer.active), i * step + step / 2, y + height / 2);
  });
}

$("strip-picture").onpointermove = ({ offsetX, offsetY, target }) => {
  const said = reports.length && experts.some(reports[0]) && experts.at(offsetX, offsetY, target);
  if (said) $("strip-about").textContent = said;
};
$("strip-picture").onpointerleave = () => draw();
new ResizeObserver(draw).observe($("strip"));
