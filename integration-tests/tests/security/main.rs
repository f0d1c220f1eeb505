//! A running system with certificates and API keys: who gets in, who does not, and certificates that
//! are replaced while it works.
#![allow(clippy::unwrap_used)]

mod admin;
mod keys;
mod pki;
mod roles;
mod rotation;
mod settings;
