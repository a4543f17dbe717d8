import { badPayload } from "./stream.js";

/** No rank: positions are below 2^26. */
const NONE = 0xffffffff;

/**
 * The strata of a sparse payload (SPEC 9.3): the stratum of a position is the number of thresholds above the magnitude
 * of its old element. Magnitudes of eight bytes are held as two halves, so that no BigInt is needed.
 */
export class Strata {
  private readonly high: number[] = [];
  private readonly low: number[] = [];

  constructor(private readonly width: number, readonly m: number, bytes: Uint8Array) {
    for (let i = 0; i < m; i++) {
      const [high, low] = this.element(bytes, i * width);
      if (high === 0 && low === 0) badPayload("a threshold of 0"); // DF-ENC-10
      if (bytes[(i + 1) * width - 1] > 0x7f) badPayload("a threshold above M");
      if (i > 0 && !this.below(high, low, i - 1)) badPayload("thresholds do not fall");
      this.high.push(high);
      this.low.push(low);
    }
  }

  private element(bytes: Uint8Array, at: number): [high: number, low: number] {
    let low = 0;
    const split = Math.min(this.width, 4);
    for (let j = split - 1; j >= 0; j--) low = low * 256 + bytes[at + j];
    let high = 0;
    for (let j = this.width - 1; j >= 4; j--) high = high * 256 + bytes[at + j];
    return [high, low];
  }

  private below(high: number, low: number, i: number): boolean {
    return high < this.high[i] || (high === this.high[i] && low < this.low[i]);
  }

  /**
   * The positions of the ranks, in the same order. One pass over the base: each stratum counts its positions and waits
   * for its next rank.
   */
  positions(base: Uint8Array, ranks: Uint32Array, counts: readonly number[]): Uint32Array {
    if (this.m === 0) return ranks; // one stratum: ranks are positions, and each is below n already
    const next: number[] = [];
    const end: number[] = [];
    let sum = 0;
    for (const count of counts) {
      next.push(sum);
      sum += count;
      end.push(sum);
    }
    const positions = new Uint32Array(ranks.length);
    const population = new Uint32Array(counts.length);
    const awaited = Uint32Array.from(counts, (_, i) => (next[i] < end[i] ? ranks[next[i]] : NONE));
    const strata = this.classify(base);
    let left = ranks.length;
    for (let p = 0; p < strata.length; p++) {
      const s = strata[p];
      if (population[s]++ !== awaited[s]) continue;
      positions[next[s]++] = p;
      awaited[s] = next[s] < end[s] ? ranks[next[s]] : NONE;
      left--;
    }
    if (left > 0) badPayload("a rank beyond its stratum"); // DF-ENC-15
    return positions;
  }

  /** The stratum of every position of `base`. */
  private classify(base: Uint8Array): Uint8Array {
    const { width } = this;
    const n = base.length / width;
    const strata = new Uint8Array(n);
    if (width === 1) {
      const table = this.table(128);
      for (let p = 0; p < n; p++) strata[p] = table[base[p] & 0x7f];
    } else if (width === 2) {
      const table = this.table(32768);
      for (let p = 0, at = 0; p < n; p++, at += 2) strata[p] = table[(base[at] | (base[at + 1] << 8)) & 0x7fff];
    } else if (width === 4) {
      for (let p = 0, at = 0; p < n; p++, at += 4) {
        const magnitude = base[at] | (base[at + 1] << 8) | (base[at + 2] << 16) | ((base[at + 3] & 0x7f) << 24);
        strata[p] = this.search(0, magnitude);
      }
    } else {
      for (let p = 0; p < n; p++) {
        const [high, low] = this.element(base, 8 * p);
        strata[p] = this.search(high % 2 ** 31, low);
      }
    }
    return strata;
  }

  private search(high: number, low: number): number {
    let s = 0;
    while (s < this.m && this.below(high, low, s)) s++;
    return s;
  }

  private table(size: number): Uint8Array {
    const table = new Uint8Array(size);
    for (let i = 0; i < this.m; i++) table.fill(i + 1, 0, this.low[i]);
    return table;
  }
}
