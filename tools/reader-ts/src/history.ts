/** What the log says: branches, tags and commits (SPEC 12). */
import { type CommitInfo, type Commits, EMPTY, after, isValid, type State } from "./judge.js";
import type { Log } from "./log.js";
import type { CommitRecord, LogRecord } from "./records.js";

/** The state after the newest record, and the commits and tags below it. */
export interface History {
  readonly newest: number | null;
  readonly state: State;
  /** The valid commit at `seq`; "void" for a void one, null where there is no commit. */
  commit(seq: number): Promise<CommitRecord | "void" | null>;
  /** The content of a commit that a valid commit names. */
  content(seq: number): Promise<CommitInfo | null>;
  /** Live tags by name. */
  tags(): Promise<Map<string, number>>;
  /** The commit that a tag names; null if there is no such tag. */
  tag(name: string): Promise<number | null>;
  retired(seq: number): Promise<boolean>;
}

/** Thrown where judging a record by its neighbours does not suffice: the whole log must be folded (DF-LOG-06). */
export class NeedsFold extends Error {}

/**
 * DF-LOG-06: judges the newest record, and each commit that is asked for, from the record before it and the commits that
 * it names.
 */
export class LocalHistory implements History {
  private readonly judged = new Map<number, boolean>();
  private readonly commits: Commits = {
    valid: async (seq) => {
      const record = await this.content(seq);
      return record !== null && (await this.judge(record)) ? record : null;
    },
    content: (seq) => this.content(seq),
  };

  private constructor(private readonly log: Log, readonly newest: number | null, readonly state: State) {}

  /** Up to the newest record. */
  static async open(log: Log): Promise<LocalHistory> {
    const newest = await log.newest();
    if (newest === null) return new LocalHistory(log, null, EMPTY);
    const record = await log.record(newest);
    const history = new LocalHistory(log, newest, after(record));
    if (!(await history.judge(record))) throw new NeedsFold();
    return history;
  }

  /** What one commit needs: records up to its own, which is not judged yet. Later ones cannot change it. */
  static upTo(log: Log, seq: number): LocalHistory {
    return new LocalHistory(log, seq, EMPTY);
  }

  private async judge(record: LogRecord): Promise<boolean> {
    let valid = this.judged.get(record.seq);
    if (valid === undefined) {
      const before = await this.log.before(record);
      valid = await isValid(record, before === null ? EMPTY : after(before), this.commits);
      this.judged.set(record.seq, valid);
    }
    return valid;
  }

  async content(seq: number): Promise<CommitRecord | null> {
    if (this.newest === null || seq > this.newest) return null;
    const record = await this.log.record(seq);
    return record.kind === "commit" ? record : null;
  }

  async commit(seq: number): Promise<CommitRecord | null> {
    const record = await this.content(seq);
    if (record !== null && !(await this.judge(record))) throw new NeedsFold();
    return record;
  }

  /** Records of one kind, newest first, along their links. */
  private async *chain<K extends "tag" | "retire">(kind: K): AsyncGenerator<LogRecord & { kind: K }> {
    let below = Number.POSITIVE_INFINITY;
    let next = kind === "tag" ? this.state.lastTag : this.state.lastRetire;
    while (next !== null) {
      if (next >= below || this.newest === null || next > this.newest) throw new NeedsFold();
      const record = await this.log.record(next);
      if (record.kind !== kind) throw new NeedsFold();
      yield record as LogRecord & { kind: K };
      below = next;
      next = kind === "tag" ? record.lastTag : record.lastRetire;
    }
  }

  async tags(): Promise<Map<string, number>> {
    const seen = new Map<string, number | null>();
    for await (const record of this.chain("tag")) if (!seen.has(record.name)) seen.set(record.name, record.target);
    return new Map([...seen].filter((entry): entry is [string, number] => entry[1] !== null));
  }

  async tag(name: string): Promise<number | null> {
    for await (const record of this.chain("tag")) {
      if (record.name !== name) continue;
      if (!(await this.judge(record))) throw new NeedsFold();
      return record.target;
    }
    return null;
  }

  async retired(seq: number): Promise<boolean> {
    for await (const record of this.chain("retire")) if (record.commits.includes(seq)) return true;
    return false;
  }
}

const AHEAD = 16;

/** The state from all records from 0 on, in which void records change nothing (DF-LOG-04). */
export class FoldedHistory implements History {
  private readonly known = new Map<number, CommitInfo>();
  private readonly live = new Map<string, number>();
  private readonly gone = new Set<number>();
  state: State = EMPTY;

  private constructor(private readonly log: Log, readonly newest: number | null) {}

  /** Up to the newest record, or to an earlier one. */
  static async open(log: Log, upTo?: number): Promise<FoldedHistory> {
    const history = new FoldedHistory(log, upTo ?? (await log.newest()));
    await history.fold();
    return history;
  }

  private async fold(): Promise<void> {
    const commits: Commits = { valid: (seq) => this.content(seq), content: (seq) => this.content(seq) };
    let previous: LogRecord | null = null;
    const end: number = this.newest === null ? 0 : this.newest + 1;
    for (let seq = 0; seq < end; seq++) {
      if (seq % AHEAD === 0) await this.prefetch(seq, Math.min(seq + AHEAD, end));
      const record: LogRecord = await this.log.record(seq);
      if (previous !== null) this.log.follows(record, previous);
      if (await isValid(record, this.state, commits)) this.take(record);
      previous = record;
    }
  }

  /** Errors show when the record's turn comes. */
  private async prefetch(from: number, to: number): Promise<void> {
    const seqs = Array.from({ length: to - from }, (_, i) => from + i);
    await Promise.allSettled(seqs.map((seq) => this.log.record(seq)));
  }

  private take(record: LogRecord): void {
    this.state = after(record);
    if (record.kind === "commit") {
      const { seq, step, depth, parent, ancestors } = record;
      this.known.set(seq, { seq, step, depth, parent, ancestors });
    } else if (record.kind === "tag") {
      if (record.target === null) this.live.delete(record.name);
      else this.live.set(record.name, record.target);
    } else if (record.kind === "retire") {
      for (const seq of record.commits) this.gone.add(seq);
    }
  }

  async content(seq: number): Promise<CommitInfo | null> {
    return this.known.get(seq) ?? null;
  }

  async commit(seq: number): Promise<CommitRecord | "void" | null> {
    if (this.newest === null || seq > this.newest) return null;
    const record = await this.log.record(seq);
    if (record.kind !== "commit") return null;
    return this.known.has(seq) ? record : "void";
  }

  async tags(): Promise<Map<string, number>> {
    return new Map(this.live);
  }

  async tag(name: string): Promise<number | null> {
    return this.live.get(name) ?? null;
  }

  async retired(seq: number): Promise<boolean> {
    return this.gone.has(seq);
  }
}
