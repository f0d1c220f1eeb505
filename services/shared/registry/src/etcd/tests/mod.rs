//! Tests on a real etcd.
pub(crate) mod server;
