/** From what a caller asks for to a commit (SPEC 13, steps 2 and 3). */
import { fail, quote } from "./errors.js";
import { FoldedHistory, type History, LocalHistory, NeedsFold } from "./history.js";
import type { Log } from "./log.js";
import type { CommitRecord, Head } from "./records.js";

/** One of: the head of a branch, a step of a branch, a record's number, a tag. */
export interface At {
  readonly branch?: string;
  readonly step?: number;
  readonly seq?: number;
  readonly tag?: string;
}

/** Asks a question by neighbours first; where that does not suffice, of the fold of the whole log (DF-LOG-06). */
export async function ask<T>(log: Log, question: (history: History) => Promise<T>): Promise<T> {
  try {
    return await question(await LocalHistory.open(log));
  } catch (e) {
    if (!(e instanceof NeedsFold)) throw e;
  }
  return question(await FoldedHistory.open(log));
}

/** "void" for a void commit, null where there is no commit. A record above says nothing about one below it. */
async function commitAt(log: Log, seq: number): Promise<CommitRecord | "void" | null> {
  if (!(await log.exists(seq))) return null;
  try {
    return await LocalHistory.upTo(log, seq).commit(seq);
  } catch (e) {
    if (!(e instanceof NeedsFold)) throw e;
  }
  return (await FoldedHistory.open(log, seq)).commit(seq);
}

async function resolveSeq(log: Log, seq: number): Promise<CommitRecord> {
  const commit = await commitAt(log, seq);
  if (commit === null) fail("version-missing", `no commit has seq ${seq}`);
  if (commit === "void") fail("record-void", `record ${seq} is void`); // DF-LOG-04
  return commit;
}

export async function resolve(log: Log, at: At): Promise<CommitRecord> {
  const kinds = [at.branch, at.seq, at.tag].filter((value) => value !== undefined).length;
  if (kinds !== 1 || (at.step !== undefined && at.branch === undefined)) {
    fail("input-invalid", "ask for a branch, a branch and a step, a seq or a tag");
  }
  for (const number of [at.step, at.seq]) {
    if (number !== undefined && (!Number.isSafeInteger(number) || number < 0)) fail("input-invalid", "not a step or seq");
  }
  return at.seq !== undefined ? resolveSeq(log, at.seq) : ask(log, (history) => find(history, at));
}

async function find(history: History, at: At): Promise<CommitRecord> {
  if (at.tag !== undefined) {
    const target = await history.tag(at.tag);
    if (target === null) fail("tag-missing", `no tag ${quote(at.tag)}`);
    return named(history, target);
  }
  const branch = at.branch!;
  const head = history.state.heads.get(branch);
  if (head === undefined) fail("branch-missing", `no branch ${quote(branch)}`);
  if (head.seq === null) fail("version-missing", `branch ${quote(branch)} has no commit`);
  return named(history, at.step === undefined ? head.seq : await seqOfStep(history, head, at.step));
}

/** A commit that the state names. Were it not one, the state would not be what the log says. */
async function named(history: History, seq: number): Promise<CommitRecord> {
  const commit = await history.commit(seq);
  if (commit === null || commit === "void") throw new NeedsFold();
  return commit;
}

/** DF-LOG-08: from the head, each time to the farthest ancestor whose step is not below the one wanted. */
async function seqOfStep(history: History, head: Head, step: number): Promise<number> {
  let at = { seq: head.seq!, step: head.step!, depth: Number.NaN };
  while (at.step > step) {
    const commit = await history.content(at.seq);
    if (commit === null || commit.step !== at.step || (!Number.isNaN(at.depth) && commit.depth !== at.depth)) {
      throw new NeedsFold();
    }
    const next = commit.ancestors.filter((a) => a.step >= step).pop();
    if (next === undefined) break;
    if (next.seq >= at.seq) throw new NeedsFold(); // so that the walk ends
    at = next;
  }
  if (at.step !== step) fail("version-missing", `no commit of the branch has step ${step}`);
  return at.seq;
}
