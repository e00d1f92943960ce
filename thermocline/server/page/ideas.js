// What the page shows before a conversation begins: a sentence, and beginnings to choose from.

import { $, button, el } from "./dom.js";

const QUESTIONS = [
  "Explain how a thermocline forms in a lake.",
  "Write a Python function that finds duplicate files.",
  "Summarise the file that I attach.",
];
const BEGINNINGS = ["Once upon a time", "The little dog was", "One day, a girl named Lily"];

/** `chosen(text)`: a beginning for the message. */
export function showIdeas(chats, chosen) {
  $("empty-text").textContent = chats
    ? "Ask something. Nothing leaves this server and this browser."
    : "This model continues text: give it a beginning.";
  $("ideas").replaceChildren(...(chats ? QUESTIONS : BEGINNINGS).map((text) =>
    el("li", {}, button(text, () => chosen(text), { className: "outlined idea" }))));
}
