//! Tests on a real etcd, beyond what every backend promises.
mod endpoints;
mod outage;
mod records;
mod security;
pub(crate) mod server;
mod speed;

use std::{sync::Arc, time::Duration};

use crate::{Etcd, EtcdConfig, JoinOptions, conformance::SOON};
use server::EtcdServer;

/// The shortest lease that etcd grants with its usual election timeout.
const SHORT: Duration = Duration::from_secs(2);

fn config(server: &EtcdServer) -> EtcdConfig {
    EtcdConfig::parse(&format!("etcd://{}", server.endpoint())).unwrap()
}

fn open(server: &EtcdServer) -> Arc<Etcd> {
    Arc::new(Etcd::new(config(server)).unwrap())
}

fn options() -> JoinOptions {
    JoinOptions {
        ttl: SHORT,
        deadline: SOON,
    }
}
