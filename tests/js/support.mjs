// What the stories share. They find the server by the environment, as a user would have it.

import assert from "node:assert/strict";
import http from "node:http";
import { after, before } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { inspect } from "node:util";
import { Sandbox } from "e2b";

export const SERVER = process.env.E2B_SANDBOX_URL;

/** Asks again until the answer is truthy, and returns it. */
export async function until(condition, what, within = 10_000) {
  const deadline = Date.now() + within;
  for (;;) {
    const answer = await condition();
    if (answer) return answer;
    if (Date.now() > deadline) assert.fail(`${what} was not so within ${within} ms; last answer: ${inspect(answer)}`);
    await sleep(20);
  }
}

/** The error of a call, which must fail with this class. */
export async function failure(Class, promise) {
  const error = await promise.then((value) => assert.fail(`no ${Class.name}, but ${inspect(value)}`), (error) => error);
  assert.ok(error instanceof Class, `${Class.name} expected, but got ${inspect(error)}`);
  return error;
}

/** A sandbox for the stories of one file that do no harm to each other; it is there, and prepared, once they run. */
export function shared(prepare = async () => {}) {
  const box = {};
  before(async () => {
    box.sandbox = await Sandbox.create({ timeoutMs: 600_000 });
    await prepare(box.sandbox);
  });
  after(async () => {
    assert.ok(await box.sandbox.kill(), "the sandbox of the file ended while its stories ran");
  });
  return box;
}

/** A sandbox that the story may break. */
export async function fresh(story, options = {}) {
  const sandbox = await Sandbox.create({ timeoutMs: 300_000, ...options });
  story.after(() => sandbox.kill());
  return sandbox;
}

/** What a command in the sandbox prints. */
export async function run(sandbox, command, options) {
  return (await sandbox.commands.run(command, options)).stdout;
}

/** Waits until no process of the sandbox has this text in its command line. */
export async function noneLeft(sandbox, text) {
  const pattern = `[${text[0]}]${text.slice(1)}`;
  await until(async () => (await run(sandbox, `ps -eo args | grep '${pattern}' || true`)) === "", `the end of ${text}`);
}

/** The headers that lead to a port of a sandbox on a machine without wildcard DNS. */
export function route(sandboxId, port) {
  return { "E2b-Sandbox-Id": sandboxId, "E2b-Sandbox-Port": String(port) };
}

/** A GET of a port of the sandbox, routed by headers. */
export function get(sandbox, port, path = "/", options = {}) {
  return fetch(SERVER + path, { headers: route(sandbox.sandboxId, port), ...options });
}

/** A GET whose Host header names the port of the sandbox; `fetch` would not let us set it. */
export function getByHost(host, path = "/") {
  return new Promise((resolve, reject) => {
    const request = http.get(SERVER + path, { headers: { Host: host } }, async (answer) => {
      try {
        resolve({ status: answer.statusCode, text: (await answer.setEncoding("utf8").toArray()).join("") });
      } catch (error) {
        reject(error);
      }
    });
    request.on("error", reject);
  });
}

/** A terminal whose output is collected. */
export class Terminal {
  output = "";

  static async open(sandbox, options = {}) {
    const terminal = new Terminal();
    const decoder = new TextDecoder();
    terminal.sandbox = sandbox;
    terminal.handle = await sandbox.pty.create({
      cols: 80,
      rows: 24,
      timeoutMs: 60_000,
      onData: (data) => {
        terminal.output += decoder.decode(data, { stream: true });
      },
      ...options,
    });
    // Nobody may be waiting when it ends.
    terminal.ended = terminal.handle.wait().catch((error) => error);
    return terminal;
  }

  type(text) {
    return this.sandbox.pty.sendInput(this.handle.pid, new TextEncoder().encode(text));
  }

  expect(text, within = 15_000) {
    return until(() => this.output.includes(text), `${inspect(text)} in the terminal`, within);
  }

  /** The shell waits for a line. gVisor leaves an interrupt character in the input, at which the shell rings the bell. */
  expectPrompt() {
    return until(() => /\$ \x07*$/.test(this.output), "a prompt", 15_000);
  }

  async end() {
    await this.sandbox.pty.kill(this.handle.pid);
    await this.ended;
  }
}
