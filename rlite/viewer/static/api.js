// Questions to the server, or to the answers that an exported file carries.

let carried = null;
const RECENT = 64; // answers that are kept until a run changes
const MAX_NAMES = 4000; // characters of the names in an address, of which a server reads about 8,000
const OF_TRACE = /^\/api\/(runs|timeline)\?/; // answers that a trace changes
const recent = new Map();

export const isExport = () => document.getElementById("answers") !== null;

export async function start() {
  const packed = document.getElementById("answers");
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  carried = await new Response(stream).json();
}

// Answers are kept, but those that a signal may abort.
export async function ask(name, parameters = {}, signal = null) {
  const texts = Object.entries(parameters).flatMap(([key, value]) => [value].flat().map((each) => [key, String(each)]));
  if (carried) return lookUp(name, texts);
  const address = `/api/${name}?${new URLSearchParams(texts)}`;
  if (signal) return fetched(address, signal);
  if (!recent.has(address)) {
    if (recent.size >= RECENT) recent.delete(recent.keys().next().value);
    recent.set(address, fetched(address).catch((error) => {
      recent.delete(address);
      throw error;
    }));
  }
  return recent.get(address);
}

async function fetched(address, signal = null) {
  const response = await fetch(address, { signal });
  const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(body.error);
  return body;
}

// The server is asked in portions that an address can hold. In an exported file each metric is a question of its own, so
// that the file needs to carry each only once.
export async function series(run, names) {
  if (!carried) return Object.assign({}, ...(await Promise.all(portions(names).map((each) => ask("series", { run, names: each })))));
  return Object.assign({}, ...(await Promise.all(names.map((name) => ask("series", { run, names: name }).catch(() => ({}))))));
}

// Lists of names, each of at most about MAX_NAMES characters in an address.
function portions(names) {
  const made = [];
  let room = 0;
  for (const name of names) {
    const { length } = `${new URLSearchParams({ names: name })}&`;
    if (room < length) {
      made.push([]);
      room = MAX_NAMES;
    }
    made.at(-1).push(name);
    room -= length;
  }
  return made;
}

function lookUp(name, texts) {
  const key = JSON.stringify([name, texts.sort(([a], [b]) => (a < b ? -1 : 1))]);
  if (!(key in carried)) throw new Error("This file does not carry it. Open the run with: rlite view RUN");
  return carried[key];
}

// Why the server refuses to tell of changes.
async function refusal() {
  const reason = await fetched("/api/runs").then(() => "too many pages are open. Close some, then reload this one.",
    (error) => (error instanceof TypeError ? "its server does not answer. Start `rlite view` again, and open the address that it prints." : error.message));
  return `This page no longer follows the run: ${reason}`;
}

// Calls `act` when the files of a run have changed, and when the page is seen again; `actOnTrace` when only its trace
// has. A page that nobody sees holds no
// stream: a browser opens six connections to one server, for all its pages together.
//
// `tell` is called with the reason when the run is not followed, and with an empty text when it is.
export function follow({ act, actOnTrace, tell }) {
  if (carried) return;
  let events = null;
  const hear = () => {
    recent.clear();
    act();
  };
  const hearTrace = () => {
    for (const address of [...recent.keys()].filter((each) => OF_TRACE.test(each))) recent.delete(address);
    actOnTrace();
  };
  const connect = () => {
    events?.close();
    if (document.hidden) return;
    events = new EventSource("/events"); // its first message, on the run, comes at once
    events.addEventListener("run", hear);
    events.addEventListener("trace", hearTrace);
    events.addEventListener("open", () => {
      tell("");
      hearTrace(); // what it has missed
    });
    events.addEventListener("error", (event) => {
      if (event.target !== events) return;
      if (events.readyState === EventSource.CLOSED) refusal().then(tell); // the browser does not try again
      else tell("The server does not answer. The page shows what it has read.");
    });
  };
  document.addEventListener("visibilitychange", connect);
  connect();
}
