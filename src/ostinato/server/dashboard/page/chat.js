// The chat box: one conversation, answered in a stream. Models without a chat template complete the text instead.
//
// "Again" sends the same request once more and compares the words: with the same seed they must be the same.

import { call, events } from "/dashboard/api.js";
import { amount, duration, things } from "/dashboard/scale.js";

const byId = (id) => document.getElementById(id);

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

/** All that an answer consists of. */
function said(answer) {
  return JSON.stringify([answer.thoughts, answer.words]);
}

export class Chat {
  messages = []; // { role, content } of the conversation so far
  running = null; // AbortController of the answer being streamed

  constructor() {
    this.log = byId("chat-log");
    this.text = byId("chat-text");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) byId("chat-form").requestSubmit();
    });
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  /** Learn which model answers, and whether it has a chat template. */
  configure(about) {
    if (!about.layers || (this.model === about.model && this.templated === about.chat)) return;
    this.model = about.model;
    this.templated = about.chat;
    byId("chat-title").textContent = about.chat ? "Chat" : "Completion";
    this.text.placeholder = about.chat ? "Write a message" : "Write the beginning of a text";
    this.empty = about.chat
      ? "Enter sends, Shift and Enter starts a new line. Watch the charts while it answers."
      : "This model has no chat template: it goes on writing where your text ends. Enter sends.";
    if (!this.messages.length) byId("chat-empty").textContent = this.empty;
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren(byId("chat-empty") ?? Object.assign(element("p", "empty", this.empty), { id: "chat-empty" }));
    this.text.focus();
  }

  send() {
    const content = this.text.value;
    if (!content.trim() || !this.model) return;
    this.text.value = "";
    byId("chat-empty")?.remove();
    this.#turn("user", content);
    this.#answer(this.#request(content), [...this.messages, { role: "user", content }]);
  }

  #request(content) {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    const body = {
      model: this.model,
      stream: true,
      stream_options: { include_usage: true },
      temperature: number("chat-temperature"),
      max_tokens: number("chat-tokens"),
      seed: number("chat-seed"),
    };
    if (!this.templated) return { ...body, prompt: content };
    return { ...body, messages: [...this.messages, { role: "user", content }] };
  }

  #turn(role, words) {
    const turn = element("div", `turn ${role}`);
    turn.append(element("div", "words", words));
    this.log.append(turn);
    this.#follow(true);
    return turn;
  }

  /** Keep the end in sight, unless the reader has scrolled up. */
  #follow(always = false) {
    const below = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight;
    if (always || below < 80) this.log.scrollTop = this.log.scrollHeight;
  }

  #busy(controller) {
    this.running = controller;
    byId("chat-send").textContent = controller ? "Stop" : "Send";
    for (const button of this.log.querySelectorAll("button")) button.disabled = Boolean(controller);
  }

  /** Stream the answer to `body`; `conversation` is what it answers. `expected`: what it should repeat. */
  async #answer(body, conversation, expected = null) {
    const controller = new AbortController();
    const turn = this.#turn("assistant running", "");
    this.#busy(controller);
    const answer = { words: "", thoughts: "", usage: null, reason: null, started: performance.now(), first: null };
    let failure = null;
    try {
      await this.#stream(body, controller.signal, turn.firstChild, answer);
    } catch (error) {
      failure = controller.signal.aborted ? "stopped" : error.message;
    }
    const current = this.running === controller;
    if (current) this.#busy(null);
    turn.classList.remove("running");
    if (!turn.isConnected) return; // the conversation was cleared meanwhile
    if (!failure || answer.words) this.messages = [...conversation, { role: "assistant", content: answer.words }];
    this.#foot(turn, answer, failure, { body, conversation, expected });
    this.#follow();
  }

  async #stream(body, signal, place, answer) {
    const path = this.templated ? "/v1/chat/completions" : "/v1/completions";
    const response = await call(path, { body, signal });
    for await (const event of events(response)) {
      answer.usage = event.usage ?? answer.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      answer.reason = choice.finish_reason ?? answer.reason;
      const thought = choice.delta?.reasoning_content ?? "";
      const piece = choice.delta?.content ?? choice.text ?? "";
      if (!thought && !piece) continue;
      answer.first ??= performance.now();
      if (thought && !answer.thoughts) place.before(element("div", "thoughts"));
      if (thought) place.previousSibling.append(thought);
      answer.thoughts += thought;
      answer.words += piece;
      place.append(piece);
      this.#follow();
    }
    answer.ended = performance.now();
  }

  /** The small print below an answer: its times, how it ended, and "Again". */
  #foot(turn, answer, failure, { body, conversation, expected }) {
    const foot = element("div", "meta");
    const tokens = answer.usage?.completion_tokens;
    if (tokens) foot.append(element("span", "", things(tokens, "token")));
    if (answer.first) foot.append(element("span", "", `first after ${duration((answer.first - answer.started) / 1000)}`));
    if (tokens > 1 && answer.ended > answer.first) {
      const speed = ((tokens - 1) * 1000) / (answer.ended - answer.first);
      foot.append(element("span", "", `${amount(speed)} tokens/s`));
    }
    if (answer.reason === "length") foot.append(element("span", "", "longest answer reached"));
    if (failure) foot.append(element("span", failure === "stopped" ? "" : "error", failure));
    else if (expected !== null) {
      const same = expected === said(answer);
      foot.append(element("span", same ? "same" : "error", same ? "the same, word for word" : "other words than before"));
    }
    if (!failure) {
      const again = element("button", "link", "Again");
      again.type = "button";
      again.addEventListener("click", () => !this.running && this.#answer(body, conversation, said(answer)));
      foot.append(again);
    }
    turn.append(foot);
  }
}
