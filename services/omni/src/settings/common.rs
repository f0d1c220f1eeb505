//! What every process has.
use super::table::{
    Fallback::{Unset, Value},
    Setting, setting,
};

/// Settings of every role.
pub(super) const COMMON: [Setting; 17] = [
    setting(
        "admin_listen",
        "HOST:PORT",
        Value("127.0.0.1:0"),
        "Where /livez, /readyz and /metrics answer",
    ),
    setting(
        "admin_tls",
        "auto|off|on|mutual",
        Value("auto"),
        "How admin_listen speaks: in clear, over TLS, or over TLS with a certificate of a monitor or an admin for all but \
         probes; auto: over TLS where there are certificates",
    ),
    setting(
        "advertise",
        "URL",
        Unset,
        "Address that other processes use, when it differs from the one listened on",
    ),
    setting(
        "pool",
        "NAME",
        Value("default"),
        "Pool this process belongs to",
    ),
    setting(
        "log_level",
        "FILTER",
        Value("info"),
        "Log filter, for example info,router=debug",
    ),
    setting("log_format", "FORMAT", Value("auto"), "auto, text or json"),
    setting(
        "otlp_endpoint",
        "URL",
        Unset,
        "OpenTelemetry collector that traces go to (OTLP over gRPC) [default: none]",
    ),
    setting(
        "tls",
        "auto|on|off",
        Value("auto"),
        "Mutual TLS; auto: with certificates, and in clear only on this machine",
    ),
    setting(
        "tls_cert",
        "FILE",
        Unset,
        "Certificate of this process (PEM), whose URI names its role",
    ),
    setting("tls_key", "FILE", Unset, "Key of the certificate (PEM)"),
    setting(
        "tls_ca",
        "FILE",
        Unset,
        "Whose certificates are accepted, of servers and of clients (PEM)",
    ),
    setting(
        "cluster",
        "NAME",
        Value("default"),
        "Cluster to join; several may share one etcd",
    ),
    setting(
        "registry_ca",
        "FILE",
        Unset,
        "Whom to trust as etcd (PEM); given: TLS, else in clear",
    ),
    setting(
        "registry_cert",
        "FILE",
        Unset,
        "Client certificate for etcd (PEM)",
    ),
    setting(
        "registry_key",
        "FILE",
        Unset,
        "Key of the client certificate (PEM)",
    ),
    setting("registry_user", "NAME", Unset, "User of etcd"),
    setting(
        "registry_password_file",
        "FILE",
        Unset,
        "File with that user's password",
    ),
];
