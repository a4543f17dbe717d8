/** The classes and codes of SPEC 17. A caller handles the class; the code says what happened. */
const CLASS_OF_CODE = {
  "json-invalid": "MALFORMED",
  "value-invalid": "MALFORMED",
  "manifest-invalid": "MALFORMED",
  "payload-invalid": "MALFORMED",
  "input-invalid": "MALFORMED",
  "feature-unknown": "UNSUPPORTED",
  "format-unknown": "UNSUPPORTED",
  "digest-unknown": "UNSUPPORTED",
  "dtype-unknown": "UNSUPPORTED",
  "encoding-unknown": "UNSUPPORTED",
  "not-supported": "UNSUPPORTED",
  "digest-mismatch": "CORRUPT",
  "hash-mismatch": "CORRUPT",
  "size-mismatch": "CORRUPT",
  "frame-corrupt": "CORRUPT",
  "chain-broken": "CORRUPT",
  "store-missing": "MISSING",
  "object-missing": "MISSING",
  "version-missing": "MISSING",
  "version-retired": "MISSING",
  "branch-missing": "MISSING",
  "tag-missing": "MISSING",
  "tensor-missing": "MISSING",
  "file-missing": "MISSING",
  "record-void": "INCONSISTENT",
  "record-misplaced": "INCONSISTENT",
  "root-mismatch": "INCONSISTENT",
  "parts-disagree": "INCONSISTENT",
  "limit-exceeded": "LIMIT",
  "path-unsafe": "UNSAFE",
  "external-refused": "UNSAFE",
  "store-failed": "STORE",
} as const;

export type ErrorCode = keyof typeof CLASS_OF_CODE;
export type ErrorClass = (typeof CLASS_OF_CODE)[ErrorCode];

/** DF-ERR-01: every rejection carries its class from the table. */
export class DeltaformatError extends Error {
  readonly class: ErrorClass;
  readonly code: ErrorCode;

  constructor(code: ErrorCode, message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = "DeltaformatError";
    this.code = code;
    this.class = CLASS_OF_CODE[code];
  }
}

export function fail(code: ErrorCode, message: string, cause?: unknown): never {
  throw new DeltaformatError(code, message, cause === undefined ? undefined : { cause });
}

export function isError(e: unknown, ...codes: ErrorCode[]): e is DeltaformatError {
  return e instanceof DeltaformatError && (codes.length === 0 || codes.includes(e.code));
}

/** Names come from the store, so they are quoted and kept short in messages. */
export function quote(text: string): string {
  return JSON.stringify(text.length > 200 ? `${text.slice(0, 200)}…` : text);
}
