// Requests to the server: the API key of this tab, errors as sentences, and streams of server-sent events.

const KEY = "ostinato-key";

/** A refusal by the server, with its own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask the user for a key; resolves when one was given. Concurrent callers share one dialog. */
let asking = null;
function askForKey(rejected) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key-input");
    document.getElementById("key-error").textContent = rejected ? "The server refused that key." : "";
    input.value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    document.getElementById("key-form").addEventListener(
      "submit",
      () => {
        sessionStorage.setItem(KEY, input.value.trim());
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

/** fetch with the key; asks for one and tries again when the server answers 401. Raises ApiError for refusals. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = body === undefined ? {} : { "Content-Type": "application/json" };
    if (key) headers.Authorization = `Bearer ${key}`;
    const method = body === undefined ? "GET" : "POST";
    const response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
    if (response.status === 401) {
      // Another caller may have got a new key meanwhile.
      if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
      continue;
    }
    if (!response.ok) throw new ApiError(response.status, await refusal(response));
    return response;
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    const found = JSON.parse(text);
    return found.error?.message ?? found.detail ?? text;
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

/** The JSON events of a stream, until [DONE]. Raises ApiError for an error event or a stream that breaks off. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "the stream broke off before its end");
    const frames = (rest + value).split(/\r?\n\r?\n/);
    rest = frames.pop();
    for (const frame of frames) {
      const lines = frame.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.code ?? 0, event.error.message ?? "the server gave an error");
      yield event;
    }
  }
}
