//! The kinds of things there are, and the columns of each.
use crate::resource::{Kind, bytes, column, duration, short};

pub(super) static MEMBERS: Kind = Kind {
    plural: "members",
    singular: "member",
    id: "id",
    columns: &[
        column("ROLE", "role"),
        column("ID", "id"),
        column("POOL", "pool"),
        column("STATE", "state"),
        column("LOAD", "load"),
        column("ENDPOINT", "endpoint"),
        column("EPOCH", "epoch").wide(),
        column("CORDONED", "cordoned").wide(),
        column("MODEL", "model").wide(),
        column("WEIGHTS", "weights_id").wide().shown(short),
    ],
};

pub(super) static POOLS: Kind = Kind {
    plural: "pools",
    singular: "pool",
    id: "name",
    columns: &[
        column("NAME", "name"),
        column("MEMBERS", "members"),
        column("READY", "ready"),
        column("RUNNING", "running"),
        column("QUEUED", "queued"),
        column("CAPACITY", "capacity"),
        column("MODELS", "models"),
        column("STARTING", "starting").wide(),
        column("DRAINING", "draining").wide(),
        column("CORDONED", "cordoned").wide(),
        column("PLAN", "plan_generation").wide(),
    ],
};

pub(super) static REQUESTS: Kind = Kind {
    plural: "requests",
    singular: "request",
    id: "id",
    columns: &[
        column("ID", "id"),
        column("STATE", "state"),
        column("STEP", "steps"),
        column("SIZE", "size"),
        column("IMAGES", "n"),
        column("PRIORITY", "priority"),
        column("AGE", "age_ms").shown(duration),
        column("ERROR", "code"),
        column("MODE", "mode").wide(),
        column("SEED", "seed").wide(),
        column("GUIDANCE", "guidance").wide(),
        column("COST", "cost").wide(),
        column("QUEUE", "queue_ms").wide().shown(duration),
        column("PREFILL", "prefill_ms").wide().shown(duration),
        column("TRANSFER", "transfer_ms").wide().shown(duration),
        column("DENOISE", "denoise_ms").wide().shown(duration),
        column("DECODE", "decode_ms").wide().shown(duration),
        column("MODEL", "model").wide(),
    ],
};

pub(super) static SLOTS: Kind = Kind {
    plural: "kv",
    singular: "slot",
    id: "slot",
    columns: &[
        column("SLOT", "slot"),
        column("STATE", "state"),
        column("BYTES", "bytes").shown(bytes),
        column("TOKENS", "tokens"),
        column("LEASES", "leases"),
        column("CACHE", "cache"),
        column("IDENTITY", "identity").shown(short),
        column("REQUEST", "request_id"),
        column("SERVICE", "service").wide(),
        column("HITS", "hits").wide(),
        column("PULLS", "pulls").wide(),
        column("GENERATION", "generation").wide(),
        column("SCOPE", "scope").wide(),
    ],
};

pub(super) static PLANS: Kind = Kind {
    plural: "plans",
    singular: "plan",
    id: "pool",
    columns: &[
        column("POOL", "pool"),
        column("GENERATION", "generation"),
        column("EPOCH", "epoch"),
        column("BODY", "body"),
    ],
};
