import { fail } from "./errors.js";
import type { Hashes } from "./hash.js";
import { decompressFrame } from "./zstd.js";
import { frameEnd, readFrameHeader } from "./zstdHeader.js";

export function badPayload(message: string): never {
  return fail("payload-invalid", message);
}

/** A payload, read from its first byte to its last (SPEC 9). */
export class PayloadReader {
  private at = 0;

  constructor(private readonly bytes: Uint8Array, private readonly hashes: Hashes) {}

  take(n: number): Uint8Array {
    if (n > this.bytes.length - this.at) badPayload("a payload is cut short"); // DF-ENC-05
    this.at += n;
    return this.bytes.subarray(this.at - n, this.at);
  }

  byte(): number {
    return this.take(1)[0];
  }

  /** DF-ENC-01 */
  varint(): number {
    let value = 0;
    for (let i = 0; i < 5; i++) {
      const b = this.byte();
      value += (b & 0x7f) * 2 ** (7 * i);
      if (b < 0x80) {
        if (i > 0 && b === 0) badPayload("a varint is not the shortest");
        if (value >= 2 ** 32) badPayload("a varint is too large");
        return value;
      }
    }
    return badPayload("a varint is too long");
  }

  /** A stream of `expected` bytes (9.1). The result may be a part of the payload: it must not be changed. */
  stream(expected: number): Uint8Array {
    if (expected === 0) return new Uint8Array(0); // DF-ENC-08
    const header = this.varint();
    if (header === 0) return this.take(expected);
    if (header === 1) return new Uint8Array(expected).fill(this.byte());
    return this.frame(this.take(header), expected);
  }

  /** DF-ENC-09: the header is checked, and the frame's end found, before memory is taken. */
  private frame(frame: Uint8Array, expected: number): Uint8Array {
    const header = readFrameHeader(frame);
    if (typeof header === "string") badPayload(header);
    if (header.contentSize !== expected) badPayload("a zstd frame states another content size");
    const end = frameEnd(frame, header);
    if (end < 0) fail("frame-corrupt", "a zstd frame is cut short");
    if (end < frame.length) badPayload("bytes after a zstd frame");
    return decompressFrame(frame, header, this.hashes);
  }

  /** DF-ENC-05 */
  finish(): void {
    if (this.at !== this.bytes.length) badPayload("bytes left over in a payload");
  }
}
