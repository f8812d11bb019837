// Users, and sudo although the engine ignores set-uid.

import assert from "node:assert/strict";
import { test } from "node:test";
import { CommandExitError } from "e2b";
import { Terminal, failure, run, shared } from "./support.mjs";

const box = shared();

test("sudo is root without a password", async () => {
  assert.equal(await run(box.sandbox, "sudo whoami"), "root\n");
  assert.equal(await run(box.sandbox, "sudo id -u; id -u"), "0\n1000\n");
  assert.equal(await run(box.sandbox, "sudo -u user whoami"), "user\n");
});

test("sudo passes the exit code", async () => {
  for (const code of [0, 1, 42, 255]) {
    assert.equal(await run(box.sandbox, `sudo sh -c 'exit ${code}'; echo $?`), `${code}\n`);
  }
});

test("sudo passes descriptors", async () => {
  assert.equal(await run(box.sandbox, "printf abc | sudo cat | sudo tr a-z A-Z"), "ABC");
});

test("sudo resets the environment", async () => {
  const env = await run(box.sandbox, "sudo env", { envs: { LD_PRELOAD: "/nowhere.so", SECRET: "x" } });
  assert.doesNotMatch(env, /SECRET|LD_PRELOAD/);
  assert.match(env, /^SUDO_USER=user$/m);
});

test("sudo is interactive in a terminal", async (story) => {
  const terminal = await Terminal.open(box.sandbox);
  story.after(() => terminal.end());
  await terminal.type("sudo -i\n");
  await terminal.type("echo I-am-$(whoami)-$(tty | cut -c1-8)\n");
  await terminal.expect("I-am-root-/dev/pts");
  await terminal.type("exit\n");
  await terminal.expectPrompt();
  await terminal.type("echo again-$(whoami)\n");
  await terminal.expect("again-user");
});

test("missing command and user", async () => {
  const missing = await failure(CommandExitError, run(box.sandbox, "sudo no-such-program"));
  assert.match(missing.stderr, /no-such-program/);
  await failure(CommandExitError, run(box.sandbox, "sudo -u nobody-here true"));
});

test("only the sudo group may", async () => {
  await run(box.sandbox, "useradd -m outsider", { user: "root" });
  const refused = await failure(CommandExitError, run(box.sandbox, "sudo whoami", { user: "outsider" }));
  assert.doesNotMatch(refused.stdout, /root/);
  assert.equal(await run(box.sandbox, "whoami", { user: "outsider" }), "outsider\n");
});

test("users are kept apart", async () => {
  await run(box.sandbox, "echo secret > /root/s; chmod 600 /root/s", { user: "root" });
  await failure(CommandExitError, run(box.sandbox, "cat /root/s"));
});
