// Random numbers that can be made anew. V8 and OpenSSL seed themselves once in a process, and copies of it would go on with
// the same state. So Math.random is one whose seed can be replaced, and what `crypto` gives to programs is read from the
// kernel. What OpenSSL draws by itself, for TLS in this very process, is not covered: start a process for that.
'use strict';
const crypto = require('crypto');
const fs = require('fs');

const kernel = fs.openSync('/dev/urandom', 'r');
const state = new BigUint64Array(2);

function bytes(count) {
  const buffer = Buffer.allocUnsafe(count);
  for (let done = 0; done < count;) done += fs.readSync(kernel, buffer, done, count - done, null);
  return buffer;
}

function reseed() {
  do {
    const seed = bytes(16);
    state[0] = seed.readBigUInt64LE(0);
    state[1] = seed.readBigUInt64LE(8);
  } while (state[0] === 0n && state[1] === 0n);
}

// xorshift128+, as V8 itself has it; 53 bits of each number.
function random() {
  let a = state[0];
  const b = state[1];
  state[0] = b;
  a = BigInt.asUintN(64, a ^ (a << 23n));
  state[1] = a ^ b ^ (a >> 17n) ^ (b >> 26n);
  return Number(BigInt.asUintN(64, state[1] + b) >> 11n) / 2 ** 53;
}

function later(callback, value) {
  process.nextTick(() => callback(null, value));
}

function fill(target, offset = 0, size = target.byteLength - offset) {
  const view = new Uint8Array(target.buffer || target, target.byteOffset || 0, target.byteLength);
  view.set(bytes(size), offset);
  return target;
}

function int(low, high) {
  const range = BigInt(high) - BigInt(low);
  if (range <= 0n || range > 1n << 48n) throw new RangeError('the range must be 1 to 2 ** 48');
  const top = (1n << 64n) - ((1n << 64n) % range);
  for (;;) {
    const drawn = bytes(8).readBigUInt64LE(0);
    if (drawn < top) return Number(BigInt(low) + (drawn % range));
  }
}

Math.random = random;
crypto.randomBytes = (size, callback) => (callback ? later(callback, bytes(size)) : bytes(size));
crypto.randomFillSync = fill;
crypto.randomFill = (target, ...rest) => later(rest.pop(), fill(target, ...rest));
crypto.randomInt = (low, high, callback) => {
  if (high === undefined || typeof high === 'function') return crypto.randomInt(0, low, high);
  return callback ? later(callback, int(low, high)) : int(low, high);
};
crypto.randomUUID = () => {
  const id = bytes(16);
  id[6] = (id[6] & 0x0f) | 0x40;
  id[8] = (id[8] & 0x3f) | 0x80;
  const hex = id.toString('hex');
  return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join('-');
};
crypto.webcrypto.getRandomValues = (target) => fill(target);
crypto.webcrypto.randomUUID = crypto.randomUUID;
reseed();

module.exports = { reseed };
