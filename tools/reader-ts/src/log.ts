/** Fetches records, and finds the newest (SPEC 12.4). */
import { fail } from "./errors.js";
import { Fields } from "./fields.js";
import type { Hashes } from "./hash.js";
import { parseJson } from "./json.js";
import { HINT_KEY, recordKey } from "./keys.js";
import { type Limits, MAX_SAFE, within } from "./limits.js";
import { type LogRecord, parseRecord } from "./records.js";
import type { Store } from "./store.js";

const CACHE_BYTES = 32 * 1024 * 1024;

export class Log {
  private readonly cache = new Map<number, LogRecord>();
  private cached = 0;

  constructor(private readonly store: Store, private readonly limits: Limits, private readonly hashes: Hashes) {}

  async record(seq: number): Promise<LogRecord> {
    const known = this.cache.get(seq);
    if (known !== undefined) return known;
    const bytes = await this.store.get(recordKey(seq), this.limits.recordBytes);
    if (bytes === null) fail("object-missing", `record ${seq} is missing`);
    within(bytes.length, this.limits.recordBytes, `record ${seq}`);
    const record = parseRecord(bytes, seq, this.hashes);
    this.keep(record);
    return record;
  }

  /** Records do not change (DF-STO-01), so they are kept; the oldest goes first. */
  private keep(record: LogRecord): void {
    if (this.cache.has(record.seq)) return;
    this.cache.set(record.seq, record);
    this.cached += record.size;
    for (const [seq, oldest] of this.cache) {
      if (this.cached <= CACHE_BYTES || seq === record.seq) break;
      this.cache.delete(seq);
      this.cached -= oldest.size;
    }
  }

  /** The record before, once `prev` has been found to be its hash (DF-LOG-02). */
  async before(record: LogRecord): Promise<LogRecord | null> {
    if (record.seq === 0) return null;
    const previous = await this.record(record.seq - 1);
    this.follows(record, previous);
    return previous;
  }

  follows(record: LogRecord, previous: LogRecord): void {
    if (record.prev !== previous.hash) fail("chain-broken", `record ${record.seq} does not follow record ${previous.seq}`);
  }

  async exists(seq: number): Promise<boolean> {
    return this.cache.has(seq) || (await this.store.getRange(recordKey(seq), 0, 1)) !== null;
  }

  /** DF-LOG-09: a hint that is not valid, or names a record that does not exist, is no hint. */
  private async hint(): Promise<number | null> {
    const bytes = await this.store.get(HINT_KEY, this.limits.descriptorBytes);
    if (bytes === null || bytes.length > this.limits.descriptorBytes) return null;
    try {
      return new Fields(parseJson(bytes), "hint").integer("seq");
    } catch {
      return null;
    }
  }

  /** The newest record's number, or null if there is none. Existence is monotone: doubling, then bisection. */
  async newest(): Promise<number | null> {
    const hint = await this.hint();
    let low = hint !== null && (await this.exists(hint)) ? hint : -1;
    let step = 1;
    let high = low + 1;
    while (high <= MAX_SAFE && (await this.exists(high))) {
      low = high;
      step *= 2;
      high = low + step;
    }
    high = Math.min(high, MAX_SAFE);
    while (high - low > 1) {
      const middle = low + Math.floor((high - low) / 2);
      if (await this.exists(middle)) low = middle;
      else high = middle;
    }
    return low < 0 ? null : low;
  }
}
