/** A zstd frame's header (RFC 8878, 3.1.1.1), read before any memory is taken for the content. */
export interface FrameHeader {
  /** Where the blocks begin. */
  readonly blocks: number;
  readonly contentSize: number;
  readonly windowSize: number;
  readonly hasChecksum: boolean;
}

/** DF-ENC-09, DF-MAN-02 */
export const MAX_WINDOW = 128 * 1024 * 1024;

const DICT_BYTES = [0, 1, 2, 4];

/** The header, or the reason why it is not one that this format allows. */
export function readFrameHeader(frame: Uint8Array): FrameHeader | string {
  if (frame.length < 5) return "a zstd frame header is cut short";
  if (frame[0] !== 0x28 || frame[1] !== 0xb5 || frame[2] !== 0x2f || frame[3] !== 0xfd) return "not a zstd frame";
  const flags = frame[4];
  if ((flags & 0x08) !== 0) return "a zstd frame header with its reserved bit set";
  const single = (flags & 0x20) !== 0;
  const sizeBytes = [single ? 1 : 0, 2, 4, 8][flags >> 6];
  const dictBytes = DICT_BYTES[flags & 3];
  const windowAt = 5;
  const dictAt = windowAt + (single ? 0 : 1);
  const sizeAt = dictAt + dictBytes;
  const blocks = sizeAt + sizeBytes;
  if (frame.length < blocks) return "a zstd frame header is cut short";
  if (sizeBytes === 0) return "a zstd frame does not state its content size";
  for (let i = dictAt; i < sizeAt; i++) if (frame[i] !== 0) return "a zstd frame uses a dictionary";
  let contentSize = 0;
  for (let i = blocks - 1; i >= sizeAt; i--) contentSize = contentSize * 256 + frame[i];
  if (sizeBytes === 2) contentSize += 256;
  let windowSize = contentSize;
  if (!single) {
    // Up to 2^41: beyond what 32-bit shifts hold.
    const base = 2 ** (10 + (frame[windowAt] >> 3));
    windowSize = base + (base / 8) * (frame[windowAt] & 7);
  }
  if (windowSize > MAX_WINDOW) return `a zstd window of ${windowSize} bytes`;
  return { blocks, contentSize, windowSize, hasChecksum: (flags & 0x04) !== 0 };
}

/** Where the frame ends, from its block headers alone; -1 if the bytes end before the frame does. */
export function frameEnd(frame: Uint8Array, header: FrameHeader): number {
  let at = header.blocks;
  for (;;) {
    if (at + 3 > frame.length) return -1;
    const block = frame[at] | (frame[at + 1] << 8) | (frame[at + 2] << 16);
    const type = (block >> 1) & 3;
    at += 3 + (type === 1 ? 1 : block >>> 3);
    if ((block & 1) !== 0) break;
  }
  if (header.hasChecksum) at += 4;
  return at <= frame.length ? at : -1;
}
