// Commands through the SDK.

import assert from "node:assert/strict";
import { test } from "node:test";
import { AuthenticationError, CommandExitError, InvalidArgumentError, NotFoundError, Sandbox, TimeoutError } from "e2b";
import { failure, noneLeft, run, shared, until } from "./support.mjs";

const box = shared();

test("output and code", async () => {
  const { stdout, stderr, exitCode, error } = await box.sandbox.commands.run("echo out; echo err >&2");
  assert.deepEqual([stdout, stderr, exitCode, error || undefined], ["out\n", "err\n", 0, undefined]);
});

test("exit codes", async () => {
  for (const code of [1, 2, 77, 127, 255]) {
    const failed = await failure(CommandExitError, box.sandbox.commands.run(`echo before; exit ${code}`));
    assert.deepEqual([failed.exitCode, failed.stdout], [code, "before\n"]);
  }
});

test("a signal is told from an exit", async () => {
  const killed = await failure(CommandExitError, box.sandbox.commands.run("kill -KILL $$"));
  assert.equal(killed.exitCode, -1);
  assert.match(killed.error, /killed/);
});

test("missing program", async () => {
  const failed = await failure(CommandExitError, box.sandbox.commands.run("no-such-program"));
  assert.equal(failed.exitCode, 127);
  assert.match(failed.stderr, /not found/);
});

test("where and who", async () => {
  const { sandbox } = box;
  const who = "pwd; whoami; echo $HOME $USER $LOGNAME";
  assert.equal(await run(sandbox, who), "/home/user\nuser\n/home/user user user\n");
  assert.equal(await run(sandbox, "pwd", { cwd: "/tmp" }), "/tmp\n");
  assert.equal(await run(sandbox, "pwd", { cwd: "~" }), "/home/user\n");
  assert.equal(await run(sandbox, "whoami", { user: "root" }), "root\n");
  const nowhere = await failure(InvalidArgumentError, run(sandbox, "pwd", { cwd: "/no/such/folder" }));
  assert.match(nowhere.message, /\/no\/such\/folder/);
  const nobody = await failure(AuthenticationError, run(sandbox, "pwd", { user: "nobody-here" }));
  assert.match(nobody.message, /nobody-here/);
});

test("environment is only what was given", async () => {
  const out = await run(box.sandbox, "env", { envs: { ONE: "1", TWO: "a b\nc" } });
  assert.match(out, /^ONE=1$/m);
  assert.match(out, /^TWO=a b\nc$/m);
  // What bash itself, the template and E2B define; nothing of the agent's or the server's.
  const allowed = "HOME USER LOGNAME PATH LANG PWD OLDPWD SHLVL _ ONE TWO SHELL".split(" ");
  const names = out.split("\n").filter((line) => line.includes("=")).map((line) => line.split("=")[0]);
  assert.deepEqual(names.filter((name) => !allowed.includes(name) && !name.startsWith("E2B_")), []);
});

test("output arrives while the command runs", async () => {
  const seen = [];
  const handle = await box.sandbox.commands.run("echo first; read -r line; echo $line", {
    background: true,
    stdin: true,
    onStdout: (text) => {
      seen.push(text);
    },
  });
  await until(() => seen.length > 0, "the first line");
  assert.equal(handle.exitCode, undefined);
  await handle.sendStdin("second\n");
  assert.equal((await handle.wait()).exitCode, 0);
  assert.deepEqual(seen, ["first\n", "second\n"]);
});

test("stdin ends when closed", async () => {
  const { commands } = box.sandbox;
  const handle = await commands.run("wc -c", { background: true, stdin: true });
  await commands.sendStdin(handle.pid, "12345");
  await commands.sendStdin(handle.pid, new Uint8Array([0, 255]));
  await commands.closeStdin(handle.pid);
  assert.equal((await handle.wait()).stdout.trim(), "7");
});

test("without stdin there is nothing to read", async () => {
  assert.equal(await run(box.sandbox, "cat; echo end"), "end\n");
});

test("background connect list kill", async () => {
  const { commands } = box.sandbox;
  const handle = await commands.run("echo begin; sleep 300", { background: true, envs: { MARK: "x" } });
  const listed = (await commands.list()).find((process) => process.pid === handle.pid);
  assert.equal(listed.cmd, "/bin/bash");
  assert.equal(listed.envs.MARK, "x");
  // The pid is the one that the guest sees.
  await commands.run(`kill -0 ${handle.pid}`);
  await handle.disconnect();
  const again = await commands.connect(handle.pid);
  assert.equal(again.pid, handle.pid);
  assert.equal(await commands.kill(handle.pid), true);
  assert.equal((await failure(CommandExitError, again.wait())).exitCode, -1);
  assert.equal(await commands.kill(handle.pid), false);
  await until(async () => (await commands.list()).every(({ pid }) => pid !== handle.pid), "the end of the process");
  await failure(NotFoundError, commands.connect(999_999));
});

test("disconnecting does not end a command", async () => {
  const { commands } = box.sandbox;
  const gate = await commands.run("mkfifo /tmp/gate; read -r l < /tmp/gate; exit 3", { background: true });
  await gate.disconnect();
  await until(async () => (await run(box.sandbox, "test -p /tmp/gate && echo yes || true")) === "yes\n", "the fifo");
  await commands.run("echo go > /tmp/gate", { timeoutMs: 10_000 });
  // The exit is kept for a client that comes late.
  const late = await commands.connect(gate.pid);
  assert.equal((await failure(CommandExitError, late.wait())).exitCode, 3);
});

test("timeout ends all that the command started", async () => {
  const command = "setsid sh -c '(sleep 4321 &) ; sleep 4321' & setsid sleep 4321 & sleep 4321";
  await failure(TimeoutError, box.sandbox.commands.run(command, { timeoutMs: 1_500 }));
  await noneLeft(box.sandbox, "sleep 4321");
});

test("kill ends double forked children", async () => {
  let output = "";
  const handle = await box.sandbox.commands.run("(setsid sleep 8765 &) ; echo up; sleep 8765", {
    background: true,
    onStdout: (text) => {
      output += text;
    },
  });
  await until(() => output === "up\n", "the start of the children");
  assert.equal(await handle.kill(), true);
  await failure(CommandExitError, handle.wait());
  await noneLeft(box.sandbox, "sleep 8765");
});

test("large output is complete", async () => {
  const bytes = 16 * 1024 * 1024;
  const command = `head -c ${bytes} /dev/zero | tr '\\0' 'x'; echo; echo done >&2`;
  const { stdout, stderr } = await box.sandbox.commands.run(command);
  assert.equal(stdout.length, bytes + 1);
  assert.match(stdout, /^x+\n$/);
  assert.equal(stderr, "done\n");
});

test("text cut anywhere is whole again", async () => {
  const text = "äß€😀".repeat(50_000);
  assert.ok((await run(box.sandbox, "python3 -c \"print('äß€😀' * 50000)\"")) === `${text}\n`);
});

test("a slow reader slows only itself", async () => {
  // The SDK reads on only when the last piece was dealt with, and this one never is.
  const noisy = await box.sandbox.commands.run("yes", { background: true, onStdout: () => new Promise(() => {}) });
  assert.equal(await run(box.sandbox, "echo quick"), "quick\n");
  assert.equal(await noisy.kill(), true);
  await noisy.disconnect();
});

test("many at once", async () => {
  const numbers = Array.from({ length: 20 }, (_, number) => number);
  const outputs = await Promise.all(numbers.map((number) => run(box.sandbox, `sleep 0.2; echo ${number}`)));
  assert.deepEqual(outputs, numbers.map((number) => `${number}\n`));
});

test("pid 1 is the agent and not for users", async () => {
  assert.equal((await run(box.sandbox, "ps -o ppid= $$")).trim(), "1");
  await failure(CommandExitError, run(box.sandbox, "kill -9 1"));
  assert.equal(await box.sandbox.isRunning(), true);
});

test("root may end its own computer", async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 60_000 });
  await failure(Error, sandbox.commands.run("kill -9 1; sleep 30", { user: "root" }));
  await until(async () => !(await sandbox.isRunning()), "the end of the sandbox");
  await sandbox.kill();
});
