// Interactive terminals.

import assert from "node:assert/strict";
import { test } from "node:test";
import { CommandExitError } from "e2b";
import { Terminal, noneLeft, run, shared, until } from "./support.mjs";

const box = shared();

async function open(story, options) {
  const terminal = await Terminal.open(box.sandbox, options);
  story.after(() => terminal.end());
  return terminal;
}

test("a shell in a terminal", async (story) => {
  const terminal = await open(story, { envs: { MARK: "value" }, cwd: "/tmp" });
  await terminal.type("echo $((6*7))-$MARK-$TERM; pwd; tty\n");
  await terminal.expect("42-value-xterm-256color");
  await terminal.expect("/tmp\r\n");
  await terminal.expect("/dev/pts/");
  await terminal.type("stty size\n");
  await terminal.expect("24 80");
  await box.sandbox.pty.resize(terminal.handle.pid, { rows: 50, cols: 132 });
  await terminal.type("stty size\n");
  await terminal.expect("50 132");
});

test("interrupt reaches the foreground", async (story) => {
  const terminal = await open(story);
  await terminal.type("sleep 1000\n");
  // Once it has its own program, it is in the foreground.
  const programs = () => run(box.sandbox, "ps -eo args | grep '^[s]leep' || true");
  await until(async () => (await programs()).includes("sleep 1000"), "the program in the foreground");
  await terminal.type("\x03");
  await terminal.expectPrompt();
  await terminal.type("echo back-$?\n");
  await terminal.expect("back-130");
});

test("exit ends it with its code", async (story) => {
  const terminal = await open(story);
  await terminal.type("exit 5\n");
  const ended = await terminal.ended;
  assert.ok(ended instanceof CommandExitError, ended);
  assert.equal(ended.exitCode, 5);
});

test("a second client sees the same terminal", async (story) => {
  const terminal = await open(story);
  await terminal.type("echo one-$((1+1))\n");
  await terminal.expect("one-2");
  let seen = "";
  const other = await box.sandbox.pty.connect(terminal.handle.pid, {
    onData: (data) => {
      seen += new TextDecoder().decode(data);
    },
  });
  await terminal.type("echo two-$((2+2))\n");
  await until(() => seen.includes("two-4"), "the answer at the second client");
  await terminal.expect("two-4");
  await other.disconnect();
});

test("killing is prompt and reaches its children", async () => {
  const terminal = await Terminal.open(box.sandbox);
  await terminal.type("sleep 5555 & echo started\n");
  await terminal.expect("started\r\n");
  await terminal.end();
  await noneLeft(box.sandbox, "sleep 5555");
  assert.equal(await box.sandbox.pty.kill(terminal.handle.pid), false);
});
