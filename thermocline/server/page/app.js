// The page: it shows one conversation and computes one answer at a time.

import { ApiError, generate, health, props, useKey } from "./api.js";
import * as attachments from "./attachments.js";
import { grow } from "./calls.js";
import { $, bindIcons } from "./dom.js";
import * as history from "./history.js";
import { showIdeas } from "./ideas.js";
import { bindMachine } from "./machine.js";
import { messageView } from "./messages.js";
import * as models from "./models.js";
import { request, resultsOf } from "./request.js";
import { bindSettings, bindTheme, showDefaults } from "./settings.js";
import { bindShelf } from "./shelf.js";
import * as strip from "./strip.js";

const SAVE_EVERY_MS = 1000;
const POLL_MS = 500;

let model = null; // from /props, once the model is known
let conversation = history.load(history.remembered("open", "")) ?? history.create();
let view = null; // the view of the growing answer
let running = null; // its AbortController
let atEnd = true; // whether the end of the conversation is seen

// ---- loading

/** Returns whether the server is ready. It may have been restarted with another model. */
async function begin() {
  notice(null);
  model = null;
  $("send").disabled = true;
  for (;;) {
    try {
      const state = await health();
      if (state.status === "ok") break;
      loading(state);
    } catch (error) {
      loading({ error: { message: error.message } });
    }
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
  try {
    await models.refresh();
    if (!models.current()) throw new ApiError(404, "The server has no model yet: its directory is empty.");
    model = await about(models.current());
  } catch (error) {
    $("loading").hidden = true;
    failed(error, begin);
    return false;
  }
  $("loading").hidden = true;
  describe();
  show();
  return true;
}

/** Shows what the model takes. */
function describe() {
  showDefaults(model.default_generation_settings?.params ?? {}, model.chat);
  $("input").placeholder = model.chat ? "Message" : "Text to continue";
  $("input-label").textContent = $("input").placeholder;
  $("send").lastChild.textContent = model.chat ? "Send" : "Continue";
  $("attach").hidden = !model.chat;
  showIdeas(model.chat, (text) => {
    $("input").value = text;
    fitInput();
    $("input").focus();
  });
}

/**
 * Returns what the server says of a model. One that is not loaded is taken for one that chats: to ask
 * would load it, and another one may have to go for that.
 */
async function about({ id, state }) {
  return state === "loaded" || !models.several() ? props(id) : { chat: true, guessed: true };
}

function loading(state) {
  $("loading").hidden = false;
  const { what, done, size } = state.progress ?? {};
  const doing = what && `${what[0].toUpperCase()}${what.slice(1)} ${state.id ?? "the model"}`;
  const words = doing || (state.error?.message ?? "Loading");
  $("loading-text").textContent = size ? `${words}: ${Math.floor((100 * done) / size)} %` : words;
  if (size) $("loading-bar").value = done / size;
  else $("loading-bar").removeAttribute("value");
}

// ---- the view

function show() {
  const plain = model !== null && !model.chat;
  const { messages } = conversation;
  const last = messages.findLastIndex((m) => m.role !== "tool");
  const views = messages.map((message, i) => message.role === "tool" ? null : messageView(message, {
    plain,
    growing: running !== null && i === last,
    results: resultsOf(messages, i),
    actions: running ? {} : {
      ...(plain || message.role === "user" ? { edit: (text) => edit(i, text) } : {}),
      ...(i === last && i > 0 ? { regenerate } : {}),
      ...(i === messages.length - 1 && message.calls ? { results: (all) => giveResults(message, all) } : {}),
    },
  })).filter(Boolean);
  view = views.at(-1) ?? null;
  $("log").replaceChildren(...views.map((v) => v.node));
  $("empty").hidden = model === null || views.length > 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("send").disabled = model === null;
  $("log").setAttribute("aria-busy", String(running !== null));
  showContext();
  showTitle();
  toEnd(true);
}

/** Says how much of the context the conversation takes. */
function showContext() {
  const size = model?.default_generation_settings?.n_ctx;
  const t = conversation.messages.findLast((m) => m.timings)?.timings;
  const used = t ? (t.cache_n ?? 0) + (t.prompt_n ?? 0) + (t.predicted_n ?? 0) : 0;
  const number = (n) => n.toLocaleString("en");
  $("context").textContent = size && used ? `${number(used)} of ${number(size)} tokens` : "";
}

function showTitle() {
  const title = history.titleOf(conversation);
  $("title").textContent = title;
  document.title = conversation.messages.length ? `${title} – Thermocline` : "Thermocline";
  shelf(conversation.id);
}

/** Scrolls along with an answer, unless the reader has scrolled away from its end. */
function toEnd(always) {
  if (always || atEnd) $("scroll").scrollTop = $("scroll").scrollHeight;
}

/** Returns how many pixels are below what is seen. */
function fromEnd() {
  const { scrollHeight, scrollTop, clientHeight } = $("scroll");
  return scrollHeight - scrollTop - clientHeight;
}

function notice(text, retry) {
  $("notice").hidden = text === null;
  $("notice-text").textContent = text ?? "";
  $("retry").hidden = !retry;
  $("retry").onclick = () => {
    notice(null);
    retry();
  };
  $("key-form").hidden = true;
}

/** Shows an error in one line, with a way to retry; asks for a missing key. */
function failed(error, retry) {
  if (!(error instanceof ApiError)) console.error(error);
  notice(error.message, error.status === 401 ? null : retry);
  if (error.status !== 401) return;
  $("key-form").hidden = false;
  $("key-form").onsubmit = (event) => {
    event.preventDefault();
    useKey($("key").value.trim());
    $("key").value = "";
    notice(null);
    retry();
  };
  $("key").focus();
}

function keep() {
  conversation.updated = Date.now();
  const kept = history.save(conversation);
  if (!kept) notice("This browser's storage is full: export this conversation to keep it.");
  history.remember("open", conversation.id);
}

// ---- answers

/** Answers the conversation. `before`: an earlier answer, which stays if no new one comes. */
async function answer(before = null) {
  const message = { role: "assistant", content: "", thought: "", finish: null, timings: null };
  const { id } = models.current();
  if (models.several()) message.model = id;
  conversation.messages.push(message);
  notice(null);
  running = new AbortController();
  show();
  $("said").textContent = "Answering";
  const unwatch = strip.watch(id);
  const arrived = showLoading();
  try {
    if (model.guessed) {
      model = await props(id, running.signal);
      describe();
      show();
    }
    await receive(message, id, running.signal, arrived);
    $("said").textContent = spoken(message);
  } catch (error) {
    message.finish = error.name === "AbortError" ? "stopped" : "broken";
    if (!message.content && !message.thought && !message.calls) {
      conversation.messages.pop();
      if (before) conversation.messages.push(before);
    }
    $("said").textContent = "The answer has ended early";
    if (error.name !== "AbortError") failed(error, async () => await begin() && regenerate());
  } finally {
    unwatch();
    arrived();
    running = null;
    keep();
    show();
    if (document.activeElement === document.body) $("input").focus(); // "Stop" had it, and is hidden now
  }
}

function spoken(message) {
  const calls = (message.calls ?? []).map((call) => `Calls ${call.name}.`);
  return [`Answer: ${message.content}`, ...calls].join(" ");
}

/** Shows how a model loads that the server loads for this answer, until the returned function is called. */
function showLoading() {
  let over = !models.several() || models.current().state === "loaded";
  if (over) return () => {};
  const look = async () => {
    if (over) return;
    await models.refresh().catch(() => {});
    if (over || !models.current()) return;
    const { id, state, progress } = models.current();
    if (state === "loading") loading({ id, progress: progress ?? { what: "loading" } });
    setTimeout(look, POLL_MS);
  };
  look();
  return () => {
    if (over) return;
    over = true;
    $("loading").hidden = true;
    models.refresh().catch(() => {});
  };
}

async function receive(message, name, signal, arrived) {
  let saved = Date.now();
  let drawn = 0;
  let thinking = 0; // since when
  const draw = () => {
    drawn = 0;
    view?.show();
    toEnd(false);
  };
  const before = conversation.messages.slice(0, -1);
  const asked = request(conversation, before, { chats: model.chat, model: name });
  try {
    for await (const piece of generate(...asked, signal)) {
      arrived();
      if (piece.thought) thinking ||= performance.now();
      if (thinking && !message.content && !message.calls) message.thought_ms = performance.now() - thinking;
      message.content += piece.text;
      message.thought += piece.thought;
      if (piece.calls.length) grow(message.calls ??= [], piece.calls);
      message.finish = piece.finish ?? message.finish;
      message.timings = piece.timings ?? message.timings;
      drawn ||= requestAnimationFrame(draw);
      if (Date.now() - saved > SAVE_EVERY_MS) {
        saved = Date.now();
        history.save(conversation);
      }
    }
  } finally {
    cancelAnimationFrame(drawn);
  }
}

function send() {
  if (running || model === null) return;
  const given = $("input").value;
  const text = model.chat ? given.trim() : continued(given);
  const files = model.chat && attachments.some() ? { files: attachments.taken() } : {};
  if (!text && !files.files && (model.chat || !conversation.messages.length)) return;
  if (text || files.files) conversation.messages.push({ role: "user", content: text, ...files });
  $("input").value = "";
  fitInput();
  answer();
}

/** Returns a space if two pieces of text would become one word. */
function continued(given) {
  const before = conversation.messages.at(-1)?.content ?? "";
  return given && /\S$/.test(before) && /^[\p{L}\p{N}]/u.test(given) ? ` ${given}` : given;
}

function regenerate() {
  if (running) return;
  answer(conversation.messages.at(-1)?.role === "assistant" ? conversation.messages.pop() : null);
}

/** Continues from a message as it is now, and drops the messages after it. */
function edit(index, text) {
  const { role, files } = conversation.messages[index];
  const changed = { role, content: text, ...(files ? { files } : {}) };
  conversation.messages = [...conversation.messages.slice(0, index), changed];
  answer();
}

/** Gives the last message's calls their results, one for each in order, and lets the model go on. */
function giveResults(message, texts) {
  if (running) return;
  const given = message.calls.map(({ id }, i) => ({ role: "tool", call: id, content: texts[i] }));
  conversation.messages.push(...given);
  answer();
}

function stop() {
  running?.abort();
}

// ---- conversations

function open(next) {
  stop();
  // Text of a stopped answer that still arrives belongs to the previous conversation.
  whenIdle(() => {
    conversation = next;
    history.remember("open", conversation.id);
    notice(null);
    show();
    $("input").focus();
  });
}

function whenIdle(then) {
  if (running) setTimeout(() => whenIdle(then), 10);
  else then();
}

const shelf = bindShelf({
  open: (id) => open(history.load(id) ?? history.create()),
  fresh: () => open({ ...history.create(), system: conversation.system, tools: conversation.tools }),
  remove: (id) => {
    if (id !== conversation.id) {
      history.remove(id);
      return showTitle();
    }
    stop();
    whenIdle(() => { // a stopped answer is saved once more
      history.remove(id);
      open(history.create());
    });
  },
  renamed: (now) => {
    if (now?.id === conversation.id) conversation.title = now.title;
    showTitle();
  },
});

/** Another tab continued or deleted this conversation; this tab must not undo that. */
history.watch((id) => {
  if (id !== conversation.id || running || document.querySelector(".editor")) return showTitle();
  conversation = history.load(id) ?? history.create();
  show();
});

// ---- the composer

function fitInput() {
  const area = $("input");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, window.innerHeight * 0.4)}px`;
}

$("input").oninput = fitInput;
$("input").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
$("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("stop").onclick = stop;
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
window.addEventListener("pagehide", () => running && history.save(conversation));

bindIcons();
bindTheme(strip.draw);
bindMachine();
bindSettings({
  get: () => conversation,
  set: ({ system, tools }) => {
    Object.assign(conversation, { system, tools });
    if (conversation.messages.length) keep();
  },
});
models.bindModels(() => (running ? null : begin()));
attachments.bindAttachments({
  ready: () => Boolean(model?.chat) && !document.querySelector("dialog[open]"),
  refused: (why) => notice(why),
});
$("notice-close").onclick = () => notice(null);
$("to-end").onclick = () => toEnd(true);
$("scroll").onscroll = () => {
  atEnd = fromEnd() < 120;
  $("to-end").hidden = fromEnd() < 240;
};
new ResizeObserver(() => toEnd(atEnd)).observe($("scroll")); // the strip came, or a phone's keyboard
show();
begin();
