// What bounds this machine: a benchmark of a few seconds that the server makes while nobody is answered.

import { benchmark } from "./api.js";
import { $, el } from "./dom.js";
import { current } from "./models.js";

const BOUNDS = {
  memory: ["Memory sets the pace.", "A token reads its weights at nearly the speed that memory has here. "
    + "A smaller format, a sparser model or faster memory makes it faster; more cores do not."],
  disk: ["The disk sets the pace.", "A token waits for weights that are not in memory. "
    + "More memory (--ram), a smaller format or a faster disk makes it faster."],
  processor: ["The processor sets the pace.", "A token reads memory more slowly than memory could deliver. "
    + "More or faster cores make it faster."],
};
const GPU = ["A GPU computes a part.", "Its memory is not measured here; thermocline doctor does that."];

let running = null; // its AbortController

const round = (x) => (x >= 100 ? Math.round(x) : Number(x.toPrecision(3)));

export function bindMachine() {
  $("open-machine").onclick = () => $("machine").showModal();
  $("machine").onclose = () => running?.abort();
  $("measure").onclick = measure;
}

async function measure() {
  if (running) return;
  running = new AbortController();
  busy(true);
  try {
    const found = await benchmark(current()?.id, running.signal);
    show(found);
    $("measured").textContent = `Measured in ${round(found.seconds)} s.`;
  } catch (error) {
    $("measured").textContent = error.name === "AbortError" ? "" : error.message;
  } finally {
    running = null;
    busy(false);
  }
}

function busy(on) {
  $("measure").disabled = on;
  $("measuring").hidden = !on;
  if (on) $("measured").textContent = "Measuring memory, disk and tokens…";
}

/** A row: a name, a bar as long as `share`, and figures in words. */
function row(name, share, words) {
  const bar = el("span", { className: "bar-fill" });
  bar.style.width = `${Math.round(100 * Math.min(1, Math.max(0, share ?? 0)))}%`;
  const track = el("span", { className: "bar-track", "aria-hidden": "true" }, bar);
  const said = el("span", { textContent: words });
  return [el("dt", { textContent: name }), el("dd", {}, said, ...(share === null ? [] : [track]))];
}

/** Shows a benchmark's answer. */
export function show(found) {
  const { answer, memory, disk } = found;
  const [headline, about] = BOUNDS[found.bound] ?? GPU;
  const rows = [];
  if (answer.tokens_per_s !== null) {
    rows.push(row("Tokens", null, `${round(answer.tokens_per_s)} a second, one answer at a time`));
  }
  if (memory.gb_per_s !== null) {
    const hidden = answer.gb_per_s === null || found.on_gpu;
    const used = hidden ? "" : `, of which a token uses ${round(answer.gb_per_s)}`;
    rows.push(row("Memory", answer.roof_share, answer.from_cache
      ? `${round(memory.gb_per_s)} GB/s; the model is so small that the processor's cache holds it`
      : `${round(memory.gb_per_s)} GB/s${used}`));
    const most = memory.gb_per_s * 1e9 / (answer.bytes_per_token || Infinity);
    if (answer.roof_share !== null) {
      rows.push(row("At most", null, `${round(most)} tokens a second, if memory were all`));
    }
  }
  if (disk.gb_per_s !== null) {
    const direct = disk.direct ? "" : " (through the system's cache, an upper bound)";
    rows.push(row("Disk", null, `${round(disk.gb_per_s)} GB/s in order${direct}`));
  } else {
    rows.push(row("Disk", null, `not measured: ${disk.why ?? "unknown"}`));
  }
  if (answer.disk_wait_share !== null) {
    const waits = answer.disk_wait_share;
    rows.push(row("Waiting", waits, `${Math.round(100 * waits)} % of the time for the disk`));
  }
  rows.push(row("Threads", null, String(found.threads)));
  $("bound").textContent = headline;
  $("bound-about").textContent = about;
  $("figures").replaceChildren(...rows.flat());
  $("found").hidden = false;
}
