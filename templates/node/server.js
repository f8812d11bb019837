// A process of Node.js that runs on: it runs what is sent to its socket, piece after piece, in one context.
'use strict';
const randomness = require('./randomness.js');
const fs = require('fs');
const net = require('net');
const util = require('util');
const vm = require('vm');

// In memory, where every user may make files, and where a deleted one is no hindrance to a pause.
const PATH = '/dev/shm/node-live.sock';
const RESEEDED = '/dev/shm/node-live.reseeded';
const MOST = 64 << 20;

// Told by the hook in /etc/sandglass/on-restore.d, which waits for the file.
process.on('SIGUSR2', () => {
  randomness.reseed();
  fs.writeFileSync(RESEEDED, '');
});

globalThis.require = require;

async function run(source) {
  try {
    const value = await vm.runInThisContext(source, { filename: 'node-live' });
    return { good: true, text: value === undefined ? '' : `${typeof value === 'string' ? value : util.inspect(value)}\n` };
  } catch (error) {
    return { good: false, text: `${error && error.stack ? error.stack : util.inspect(error)}\n` };
  }
}

// One request a connection: all that is sent until its end.
const server = net.createServer({ allowHalfOpen: true }, (client) => {
  const parts = [];
  let length = 0;
  client.on('error', () => client.destroy());
  client.on('data', (part) => {
    length += part.length;
    if (length > MOST) client.destroy();
    else parts.push(part);
  });
  client.on('end', async () => {
    const { good, text } = await run(Buffer.concat(parts).toString());
    client.end(`${good ? 0 : 1}${text}`);
  });
});
process.on('uncaughtException', (error) => console.error(error));
process.on('unhandledRejection', (error) => console.error(error));
fs.rmSync(PATH, { force: true });
server.listen(PATH);
