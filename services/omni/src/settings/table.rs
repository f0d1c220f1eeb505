//! The one table of settings: flags, environment variables, file keys, defaults and their help.

/// What a setting is when nobody sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fallback {
    /// It must be set.
    Required,
    /// It may stay unset.
    Unset,
    /// This value.
    Value(&'static str),
}

/// One setting. The flag is `--key` with dashes, the variable `OMNI_KEY` in capitals.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) key: &'static str,
    pub(crate) value_name: &'static str,
    pub(crate) fallback: Fallback,
    pub(crate) help: &'static str,
}

pub(super) const fn setting(
    key: &'static str,
    value_name: &'static str,
    fallback: Fallback,
    help: &'static str,
) -> Setting {
    Setting {
        key,
        value_name,
        fallback,
        help,
    }
}

use Fallback::{Required, Unset, Value};

use super::common::COMMON;

const MODEL: Setting = setting("model", "DIR", Required, "Checkpoint directory");
const REGISTRY: Setting = setting(
    "registry",
    "URL",
    Value("http://127.0.0.1:7600"),
    "The registry: a router, or etcd://HOST:PORT[,HOST:PORT]",
);
const KV_ENDPOINT: Setting = setting(
    "kv_transfer",
    "URL",
    Value("http://127.0.0.1:7601"),
    "Where the KV-transfer service of this node answers",
);
const TRANSPORT: Setting = setting(
    "transport",
    "NAME",
    Value("shm"),
    "How prefix KV travels: shm (shared memory) or tcp",
);
const TRANSFER_DEVICES: Setting = setting(
    "transfer_devices",
    "DEVICE[,DEVICE]",
    Unset,
    "Network interfaces that prefix KV may take over tcp, for example eth0 [default: any]",
);
const PREFIX_RELAY: Setting = setting(
    "prefix_relay",
    "off|on",
    Value("off"),
    "Fetch prefixes of other nodes through kv_transfer, so that this node reads each of them once",
);
const PLAN: Setting = setting(
    "plan",
    "PLAN",
    Value("single"),
    "Ranks of this process, for example cfg=2,tp=2,ep=cfg+tp (axes pp, cfg, ring, ulysses, tp)",
);
const THREADS: Setting = setting("threads", "N", Value("0"), "Compute threads; 0: one a core");

const DEVICE: Setting = setting(
    "device",
    "DEVICE",
    Value("cpu"),
    "What the ranks compute on: cpu, cuda, or cuda:0,1,.. with a GPU for each rank of the plan",
);
const WEIGHTS: Setting = setting(
    "weights",
    "bf16|fp8",
    Value("bf16"),
    "How a GPU holds the large matrices",
);
const GPU_MEMORY: Setting = setting(
    "gpu_memory",
    "BYTES",
    Value("auto"),
    "Memory that the stage may take of each GPU; auto: what is free",
);
const RESIDENT_LAYERS: Setting = setting(
    "resident_layers",
    "N",
    Value("all"),
    "Decoder layers that stay on the GPU: all, or a number; the others are copied in in every pass",
);

const HTTP_LISTEN: Setting = setting(
    "http_listen",
    "HOST:PORT",
    Unset,
    "Address of the HTTP API for OpenAI clients [default: that of listen with its port + 80]",
);

const STATUS_PAGE: Setting = setting(
    "status_page",
    "off|view|prompt",
    Value("view"),
    "Page about the cluster at admin_listen; prompt: who may ask for images may draw there",
);

const DRAIN_GRACE: Setting = setting(
    "drain_grace_s",
    "SECONDS",
    Value("30"),
    "How long running requests may take once a stop or a drain was asked for",
);

const ROUTER: [Setting; 10] = [
    DRAIN_GRACE,
    setting(
        "listen",
        "HOST:PORT",
        Value("127.0.0.1:7600"),
        "gRPC address",
    ),
    setting(
        "registry",
        "URL",
        Value("embedded"),
        "The registry: embedded, etcd://HOST:PORT[,HOST:PORT], or another router",
    ),
    setting(
        "max_running",
        "N",
        Value("64"),
        "Requests dispatched to the stages at once",
    ),
    setting(
        "max_queued",
        "N",
        Value("256"),
        "Requests waiting before new ones are refused",
    ),
    setting(
        "image_hosts",
        "HOST[,HOST]",
        Unset,
        "Hosts that pictures may be fetched from, NAME or *.NAME with or without :PORT; unset: none",
    ),
    setting(
        "api_keys",
        "FILE",
        Unset,
        "Whose API keys are accepted (TOML) [default: whoever connects, with TLS whoever has a certificate]",
    ),
    setting(
        "record_file",
        "FILE",
        Unset,
        "Where a JSON line is added for every request that ends, with what it takes to repeat it [default: none]",
    ),
    HTTP_LISTEN,
    STATUS_PAGE,
];

const KV_TRANSFER: [Setting; 10] = [
    setting(
        "listen",
        "HOST:PORT",
        Value("127.0.0.1:7601"),
        "gRPC address",
    ),
    REGISTRY,
    TRANSPORT,
    setting(
        "pool_bytes",
        "BYTES",
        Value("256MiB"),
        "Size of the registered pool, for example 2GiB",
    ),
    setting(
        "page_bytes",
        "BYTES",
        Value("4KiB"),
        "Prefixes start at multiples of this in the pool, a power of two",
    ),
    setting(
        "max_prefix_bytes",
        "BYTES",
        Unset,
        "Size of the largest prefix [default: that of the pool]",
    ),
    setting(
        "max_slots",
        "N",
        Value("4096"),
        "How many prefixes may be in the pool at once",
    ),
    setting(
        "prefix_cache_bytes",
        "BYTES",
        Unset,
        "How much of the pool may hold prefixes that nobody uses now [default: nothing]",
    ),
    setting(
        "pool_socket",
        "PATH",
        Unset,
        "Unix socket through which stages of the node map the pool [default: one without a file]",
    ),
    TRANSFER_DEVICES,
];

const AR_STAGE: [Setting; 15] = [
    DRAIN_GRACE,
    setting(
        "listen",
        "HOST:PORT",
        Value("127.0.0.1:7602"),
        "gRPC address",
    ),
    REGISTRY,
    KV_ENDPOINT,
    MODEL,
    PLAN,
    DEVICE,
    WEIGHTS,
    GPU_MEMORY,
    RESIDENT_LAYERS,
    TRANSPORT,
    TRANSFER_DEVICES,
    THREADS,
    setting(
        "max_queue",
        "N",
        Value("64"),
        "Requests waiting before new ones are refused",
    ),
    setting(
        "prefix_ttl_s",
        "SECONDS",
        Value("30"),
        "Bound of publishing a prefix, and how long it then waits for its router to take it over",
    ),
];

const DIT_WORKER: [Setting; 23] = [
    DRAIN_GRACE,
    setting(
        "listen",
        "HOST:PORT",
        Value("127.0.0.1:7603"),
        "gRPC address",
    ),
    REGISTRY,
    KV_ENDPOINT,
    MODEL,
    PLAN,
    DEVICE,
    WEIGHTS,
    GPU_MEMORY,
    TRANSPORT,
    TRANSFER_DEVICES,
    PREFIX_RELAY,
    THREADS,
    setting(
        "max_queue",
        "N",
        Value("64"),
        "Requests waiting before new ones are refused",
    ),
    setting("max_rows", "N", Value("16"), "Rows in one packed step"),
    setting(
        "max_tokens",
        "N",
        Value("65536"),
        "Query tokens in one packed step",
    ),
    setting(
        "eplb_interval",
        "STEPS",
        Value("0"),
        "Steps between two rebalancings of experts over ranks; 0: never",
    ),
    setting(
        "eplb_extra_slots",
        "N",
        Value("1"),
        "Expert slots of a rank beyond an even share, for replicas of hot experts",
    ),
    setting(
        "memory",
        "BYTES",
        Value("auto"),
        "Memory that the worker may take in all; auto: what the machine has free once it is loaded",
    ),
    setting(
        "batching",
        "cost|arrival",
        Value("cost"),
        "Who steps together: by what steps cost here, or by class and then in order of arrival",
    ),
    setting(
        "vae_tiles",
        "off|OVERLAP",
        Value("off"),
        "Decode in tiles that overlap by this share, for example 0.25: less memory, and ranks share them",
    ),
    setting(
        "resident_layers",
        "LAYERS|BYTES",
        Value("all"),
        "Decoder layers that stay in memory: all, a number for each rank, or bytes in all such as 40GiB; \
         the others are read from the checkpoint in every step, once for the whole batch",
    ),
    setting(
        "step_cache",
        "CACHE",
        Value("off"),
        "Steps that do without the decoder: off, taylor or tea, with options as in taylor:interval=3",
    ),
];

/// Of the common settings these concern `up`, which runs no server of its own.
const UP_TOO: [&str; 4] = ["log_level", "log_format", "tls", "otlp_endpoint"];

const UP: [Setting; 16] = [
    MODEL,
    setting(
        "device",
        "DEVICE",
        Unset,
        "What both stages compute on, see their --device",
    ),
    setting(
        "weights",
        "bf16|fp8",
        Unset,
        "How GPUs hold the large matrices, see --weights of the stages",
    ),
    setting(
        "ar_device",
        "DEVICE",
        Unset,
        "Device of the AR stage [default: that of device]",
    ),
    setting(
        "dit_device",
        "DEVICE",
        Unset,
        "Device of the DiT worker [default: that of device]",
    ),
    setting(
        "ar_plan",
        "PLAN",
        Unset,
        "Plan of the AR stage, see its --plan",
    ),
    setting(
        "dit_plan",
        "PLAN",
        Unset,
        "Plan of the DiT worker, see its --plan",
    ),
    HTTP_LISTEN,
    setting(
        "status_page",
        "off|view|prompt",
        Value("prompt"),
        "Page about the cluster at the router's admin port, which is on the loopback interface",
    ),
    setting(
        "tls_dir",
        "DIR",
        Unset,
        "Mutual TLS with the certificates of this directory, made if it has none (see omni certs)",
    ),
    setting(
        "listen",
        "HOST:PORT",
        Value("127.0.0.1:7600"),
        "gRPC address of the router",
    ),
    TRANSPORT,
    setting(
        "pool_bytes",
        "BYTES",
        Value("256MiB"),
        "Size of the KV-transfer pool",
    ),
    setting(
        "ready_file",
        "PATH",
        Unset,
        "Written with the endpoint once everything serves",
    ),
    setting(
        "start_timeout_s",
        "SECONDS",
        Value("600"),
        "How long the stages may take to load",
    ),
    setting(
        "stop_grace_s",
        "SECONDS",
        Value("40"),
        "How long a stage may take to stop",
    ),
];

/// A process of a running system, or the command that starts all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Router,
    KvTransfer,
    ArStage,
    DitWorker,
    Up,
}

impl Role {
    pub(crate) const ALL: [Role; 5] = [
        Role::Router,
        Role::KvTransfer,
        Role::ArStage,
        Role::DitWorker,
        Role::Up,
    ];

    /// Name of the subcommand.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::KvTransfer => "kv-transfer",
            Self::ArStage => "ar-stage",
            Self::DitWorker => "dit-worker",
            Self::Up => "up",
        }
    }

    /// Name of the section in the file.
    pub(crate) fn section(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::KvTransfer => "kv_transfer",
            Self::ArStage => "ar_stage",
            Self::DitWorker => "dit_worker",
            Self::Up => "up",
        }
    }

    pub(crate) fn about(self) -> &'static str {
        match self {
            Self::Router => "Serve clients, admit, place and dispatch requests",
            Self::KvTransfer => "Hold and move the prefix KV of one node",
            Self::ArStage => "Turn prompts into prefix KV",
            Self::DitWorker => "Denoise and decode images",
            Self::Up => "Run all four roles as processes on this machine",
        }
    }

    pub(crate) fn settings(self) -> impl Iterator<Item = &'static Setting> {
        let own: &'static [Setting] = match self {
            Self::Router => &ROUTER,
            Self::KvTransfer => &KV_TRANSFER,
            Self::ArStage => &AR_STAGE,
            Self::DitWorker => &DIT_WORKER,
            Self::Up => &UP,
        };
        let common = COMMON
            .iter()
            .filter(move |setting| self != Self::Up || UP_TOO.contains(&setting.key));
        own.iter().chain(common)
    }
}

impl Setting {
    pub(crate) fn flag(&self) -> String {
        self.key.replace('_', "-")
    }

    pub(crate) fn variable(&self) -> String {
        format!("OMNI_{}", self.key.to_ascii_uppercase())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_role_has_a_setting_twice() {
        for role in Role::ALL {
            let mut seen = HashSet::new();
            assert!(
                role.settings().all(|setting| seen.insert(setting.key)),
                "{role:?}"
            );
        }
    }
}
