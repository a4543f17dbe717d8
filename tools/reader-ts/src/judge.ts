/** Whether a record is valid in the state before it (SPEC 12.2): the table of preconditions and effects. */
import { pad20 } from "./keys.js";
import type { Ancestor, ClaimRecord, CommitRecord, Head, Heads, LogRecord } from "./records.js";

/** What the next record is judged against. */
export interface State {
  readonly heads: Heads;
  readonly lastTag: number | null;
  readonly lastRetire: number | null;
}

export const EMPTY: State = { heads: new Map(), lastTag: null, lastRetire: null };

/** What is asked about a commit when a record names it. */
export type CommitInfo = Pick<CommitRecord, "seq" | "step" | "depth" | "parent" | "ancestors">;

export interface Commits {
  /** The valid commit at `seq`, or null. */
  valid(seq: number): Promise<CommitInfo | null>;
  /** A commit that is known to be valid if its child is: only its content is asked for. */
  content(seq: number): Promise<CommitInfo | null>;
}

/** The state after a valid record. */
export function after(record: LogRecord): State {
  return {
    heads: record.heads,
    lastTag: record.kind === "tag" ? record.seq : record.lastTag,
    lastRetire: record.kind === "retire" ? record.seq : record.lastRetire,
  };
}

/** True if the preconditions are met and the record states the effect that the table gives. */
export async function isValid(record: LogRecord, before: State, commits: Commits): Promise<boolean> {
  if (record.lastTag !== before.lastTag || record.lastRetire !== before.lastRetire) return false;
  const change = await effect(record, before.heads, commits);
  return change !== null && sameHeads(record.heads, before.heads, change);
}

/** The one branch that a record changes (head null: removed), or no branch; null if a precondition is not met. */
type Change = { branch: string; head: Head | null } | "none";

async function effect(record: LogRecord, heads: Heads, commits: Commits): Promise<Change | null> {
  const below = async (seq: number): Promise<CommitInfo | null> => (seq < record.seq ? commits.valid(seq) : null);
  switch (record.kind) {
    case "claim":
      return claim(record, heads.get(record.branch), commits);
    case "commit":
      return commit(record, heads.get(record.branch), commits);
    case "fork": {
      if (heads.has(record.branch)) return null;
      const source = await below(record.source);
      if (source === null || source.step !== record.step) return null;
      return { branch: record.branch, head: { seq: record.source, step: record.step, epoch: 0, claim: null } };
    }
    case "tag":
      return record.target === null || (await below(record.target)) !== null ? "none" : null;
    case "drop":
      return heads.has(record.branch) ? { branch: record.branch, head: null } : null;
    case "retire": {
      const { commits: seqs } = record;
      if (seqs.length === 0 || seqs.some((seq, i) => i > 0 && seq <= seqs[i - 1])) return null;
      const taken = new Set([...heads.values()].map((head) => head.seq));
      if (seqs.some((seq) => taken.has(seq))) return null;
      for (const seq of seqs) if ((await below(seq)) === null) return null;
      return "none";
    }
  }
}

async function claim(record: ClaimRecord, old: Head | undefined, commits: Commits): Promise<Change | null> {
  if (record.epoch !== (old?.epoch ?? 0) + 1) return null;
  let { seq, step } = old ?? { seq: null, step: null };
  if (record.resumeFrom !== null) {
    if (seq === null || record.resumeFrom >= record.seq || seq >= record.seq) return null;
    const target = await commits.valid(record.resumeFrom);
    if (target === null || !(await inLineage(seq, target, commits))) return null;
    seq = target.seq;
    step = target.step;
  }
  return { branch: record.branch, head: { seq, step, epoch: record.epoch, claim: record.seq } };
}

async function commit(record: CommitRecord, old: Head | undefined, commits: Commits): Promise<Change | null> {
  if (old === undefined || old.claim !== record.claim || old.seq !== record.parent) return null;
  if (old.step !== null && record.step <= old.step) return null;
  const claimText = pad20(record.claim);
  for (const used of record.claims) if (used !== claimText) return null;
  let parent: CommitInfo | null = null;
  if (record.parent !== null) {
    parent = record.parent < record.seq ? await commits.content(record.parent) : null;
    if (parent === null) return null;
  }
  if (record.depth !== (parent === null ? 0 : parent.depth + 1)) return null;
  if (!sameAncestors(record.ancestors, ancestorsAfter(parent))) return null;
  return { branch: record.branch, head: { ...old, seq: record.seq, step: record.step } };
}

/** DF-LOG-08: the parent, then those of its entries whose depth is a multiple of a higher power of two than all before. */
export function ancestorsAfter(parent: CommitInfo | null): Ancestor[] {
  if (parent === null) return [];
  const result: Ancestor[] = [{ depth: parent.depth, seq: parent.seq, step: parent.step }];
  let highest = twos(parent.depth);
  for (const entry of parent.ancestors) {
    const power = twos(entry.depth);
    if (power > highest) {
      result.push(entry);
      highest = power;
    }
  }
  return result;
}

/** How many times two divides a depth; depth 0 is a multiple of every power. */
function twos(depth: number): number {
  if (depth === 0) return Number.POSITIVE_INFINITY;
  let n = 0;
  for (let d = depth; d % 2 === 0; d /= 2) n++;
  return n;
}

function sameAncestors(a: readonly Ancestor[], b: readonly Ancestor[]): boolean {
  return a.length === b.length
    && a.every((x, i) => x.depth === b[i].depth && x.seq === b[i].seq && x.step === b[i].step);
}

/** Goes from `seq` to the depth of `target` along the ancestors, in as few records as they allow. */
async function inLineage(seq: number, target: CommitInfo, commits: Commits): Promise<boolean> {
  let at = await commits.content(seq);
  while (at !== null && at.depth > target.depth) {
    const next: Ancestor | undefined = at.ancestors.filter((a) => a.depth >= target.depth && a.depth < at!.depth).pop();
    if (next === undefined) return false;
    at = await commits.content(next.seq);
    if (at !== null && at.depth !== next.depth) return false; // so that the walk ends
  }
  return at !== null && at.seq === target.seq;
}

function sameHeads(stated: Heads, before: Heads, change: Change): boolean {
  const branch = change === "none" ? null : change.branch;
  let expected = before.size;
  if (change !== "none") {
    if (before.has(change.branch)) expected--;
    if (change.head !== null) {
      expected++;
      if (!sameHead(stated.get(change.branch), change.head)) return false;
    } else if (stated.has(change.branch)) {
      return false;
    }
  }
  if (stated.size !== expected) return false;
  for (const [name, head] of before) if (name !== branch && !sameHead(stated.get(name), head)) return false;
  return true;
}

function sameHead(a: Head | undefined, b: Head): boolean {
  return a !== undefined && a.seq === b.seq && a.step === b.step && a.epoch === b.epoch && a.claim === b.claim;
}
