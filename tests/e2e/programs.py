"""Small servers that tests start in sandboxes."""

# Answers each message of a web socket backwards, as it comes, byte by byte and without looking at frames; at 8010.
WEB_SOCKET = r"""
import base64, hashlib, socket
l = socket.create_server(("0.0.0.0", 8010))
while True:
    c, _ = l.accept()
    head = b""
    while b"\r\n\r\n" not in head:
        head += c.recv(4096)
    key = [x.split(b":", 1)[1].strip() for x in head.split(b"\r\n") if x.lower().startswith(b"sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    c.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
              b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
    while data := c.recv(4096):
        c.sendall(data[::-1])
    c.close()
"""

# Sends one event, and another once `/open` was asked for; at 8020.
EVENTS = r"""
import http.server, threading
gate = threading.Event()
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/open":
            gate.set(); self.send_response(204); self.end_headers(); return
        self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.end_headers()
        self.wfile.write(b"data: 1\n\n"); self.wfile.flush()
        gate.wait(20)
        self.wfile.write(b"data: 2\n\n")
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8020), H).serve_forever()
"""
