//! A cluster of real processes around a real etcd: several routers, and none of them owns it.
#![allow(clippy::unwrap_used)]

mod chaos;
mod fleet;
mod outage;
// Its own tests use the rest of it.
#[allow(dead_code)]
#[path = "../../../services/shared/registry/src/etcd/tests/server.rs"]
mod server;
mod settings;

/// How the binary is found and run.
mod harness {
    pub(crate) use integration_tests::cluster::{
        bounded, command, model_dir, output, request, wait,
    };
}
