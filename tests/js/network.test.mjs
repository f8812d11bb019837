// Sealed: no way out, and it says so quickly.

import assert from "node:assert/strict";
import { test } from "node:test";
import { CommandExitError } from "e2b";
import { SERVER, failure, fresh, run, shared } from "./support.mjs";

const box = shared();

const refused = (sandbox, command) => failure(CommandExitError, sandbox.commands.run(command, { timeoutMs: 30_000 }));

async function refusedConnection(sandbox, address, port) {
  const connect = `python3 -c "import socket; socket.create_connection(('${address}', ${port}), timeout=8).recv(1)"`;
  assert.doesNotMatch((await refused(sandbox, connect)).stderr, /timed out/);
}

test("names do not resolve", async () => {
  const failed = await refused(box.sandbox, "curl -sS -m 8 https://example.com");
  assert.equal(failed.exitCode, 6);
  assert.match(failed.stderr, /Could not resolve host/);
});

test("tcp is refused at once", async () => {
  for (const [address, port] of [["1.1.1.1", 443], ["169.254.169.254", 80], ["10.0.0.1", 22], ["172.17.0.1", 80]]) {
    await refusedConnection(box.sandbox, address, port);
  }
});

test("neither gateway nor server can be reached", async () => {
  const gateway = (await run(box.sandbox, "ip route show default | cut -d' ' -f3")).trim();
  for (const address of [gateway, "127.0.0.1"].filter(Boolean)) {
    for (const port of [new URL(SERVER).port, 22]) await refusedConnection(box.sandbox, address, port);
  }
});

test("loopback works", async () => {
  const script =
    "import socket, threading\n" +
    "l = socket.create_server(('127.0.0.1', 0))\n" +
    "threading.Thread(target=lambda: l.accept()[0].sendall(b'hi'), daemon=True).start()\n" +
    "print(socket.create_connection(l.getsockname()).recv(2))\n";
  await box.sandbox.files.write("/tmp/loop.py", script);
  assert.equal(await run(box.sandbox, "python3 /tmp/loop.py"), "b'hi'\n");
});

test("internet cannot be asked for", async (story) => {
  // This version has no policy but the closed one, whatever the client asks.
  const sandbox = await fresh(story, { allowInternetAccess: true });
  assert.equal((await refused(sandbox, "curl -sS -m 8 https://example.com")).exitCode, 6);
});
