// Ports of programs inside, by header routing.

import assert from "node:assert/strict";
import { once } from "node:events";
import http from "node:http";
import { test } from "node:test";
import { SERVER, get, getByHost, route, run, shared, until } from "./support.mjs";

// Web servers inside: on all addresses at 8000, on loopback only at 8001.
const box = shared(async (sandbox) => {
  await sandbox.files.write("/home/user/www/index.html", "hello\n");
  for (const [port, bind] of [[8000, "0.0.0.0"], [8001, "127.0.0.1"]]) {
    const serve = `python3 -m http.server ${port} --bind ${bind} -d /home/user/www`;
    await (await sandbox.commands.run(serve, { background: true, timeoutMs: 0 })).disconnect();
    await until(async () => (await get(sandbox, port)).status === 200, `port ${port}`);
  }
});
const MISSING = "0".repeat(20);

async function start(script, port) {
  await box.sandbox.files.write(`/tmp/${port}.py`, script);
  const handle = await box.sandbox.commands.run(`python3 /tmp/${port}.py`, { background: true, timeoutMs: 0 });
  await handle.disconnect();
  const listening = `ss -ltn 'sport = :${port}' | grep -c LISTEN || true`;
  await until(async () => (await run(box.sandbox, listening)) === "1\n", `port ${port}`);
}

test("a web server is reached wherever it is bound", async () => {
  for (const port of [8000, 8001]) {
    const answer = await get(box.sandbox, port);
    assert.deepEqual([answer.status, await answer.text()], [200, "hello\n"]);
    assert.equal((await get(box.sandbox, port, "/none")).status, 404);
    // The name that the SDK makes is understood, too; only DNS must lead it here.
    assert.match(box.sandbox.getHost(port), new RegExp(`^${port}-${box.sandbox.sandboxId}\\.`));
    assert.deepEqual(await getByHost(box.sandbox.getHost(port)), { status: 200, text: "hello\n" });
  }
});

test("a large download is whole", async () => {
  await run(box.sandbox, "head -c 20000000 /dev/zero > /home/user/www/big");
  for (const port of [8000, 8001]) {
    assert.equal((await (await get(box.sandbox, port, "/big")).arrayBuffer()).byteLength, 20_000_000);
  }
});

test("closed port", async () => {
  const answer = await get(box.sandbox, 9);
  assert.equal(answer.status, 502);
  const { message, sandboxId, code, port } = await answer.json();
  assert.equal(message, "The sandbox is running but port is not open");
  assert.deepEqual([sandboxId, code, port], [box.sandbox.sandboxId, 502, 9]);
});

test("unknown sandbox", async () => {
  const answer = await fetch(SERVER, { headers: route(MISSING, 80) });
  assert.equal(answer.status, 502);
  const { message, sandboxId, code } = await answer.json();
  assert.deepEqual([message, sandboxId, code], ["The sandbox was not found", MISSING, 502]);
});

test("the guest cannot be used to reach others", async () => {
  for (const port of [new URL(SERVER).port, 22]) assert.equal((await get(box.sandbox, port)).status, 502);
});

test("web socket upgrade", async () => {
  // A hand-made server inside, and raw bytes both ways after the upgrade.
  await start(
    `
import base64, hashlib, socket
l = socket.create_server(("0.0.0.0", 8010))
while True:
    c, _ = l.accept()
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        head += c.recv(4096)
    key = [x.split(b":", 1)[1].strip() for x in head.split(b"\\r\\n") if x.lower().startswith(b"sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    c.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
              b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
    while data := c.recv(4096):
        c.sendall(data[::-1])
    c.close()
`,
    8010,
  );
  const request = http.get(`${SERVER}/chat`, {
    headers: {
      ...route(box.sandbox.sandboxId, 8010),
      Connection: "Upgrade",
      Upgrade: "websocket",
      "Sec-WebSocket-Version": "13",
      "Sec-WebSocket-Key": Buffer.alloc(16, 7).toString("base64"),
    },
  });
  const [answer, socket] = await once(request, "upgrade");
  assert.equal(answer.statusCode, 101);
  socket.write("abc");
  assert.equal((await once(socket, "data"))[0].toString(), "cba");
  socket.destroy();
});

test("streaming is not buffered", async () => {
  // The first event arrives while the answer is still being made.
  await start(
    `
import http.server, threading
gate = threading.Event()
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/open":
            gate.set(); self.send_response(204); self.end_headers(); return
        self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.end_headers()
        self.wfile.write(b"data: 1\\n\\n"); self.wfile.flush()
        gate.wait(20)
        self.wfile.write(b"data: 2\\n\\n")
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8020), H).serve_forever()
`,
    8020,
  );
  const answer = await get(box.sandbox, 8020, "/events");
  const parts = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  assert.equal((await parts.read()).value, "data: 1\n\n");
  await get(box.sandbox, 8020, "/open");
  assert.equal((await parts.read()).value, "data: 2\n\n");
  assert.equal((await parts.read()).done, true);
});
