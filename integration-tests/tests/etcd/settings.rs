//! The settings of an etcd registry, from the command line to a TLS connection.
use std::fs;

use proto::v1::Role;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

use crate::{
    fleet::{Process, ready},
    harness::{command, output},
    server::EtcdServer,
};

#[test]
fn bad_settings_end_with_64_and_name_the_field() {
    let etcd = ["--registry", "etcd://far:2379"];
    let plain = ["--registry", "http://127.0.0.1:1"];
    let cases: [(&[&str], &[&str], &str); 9] = [
        (&["--registry", "etcd"], &[], "registry must be"),
        (&["--registry", "etcd://a:1,b"], &[], "registry must be"),
        (&etcd, &["--cluster", "a/b"], "cluster must be"),
        (
            &etcd,
            &["--registry-ca", "/nonexistent/ca"],
            "registry_ca /nonexistent/ca",
        ),
        (
            &etcd,
            &["--registry-cert", "c"],
            "registry_cert needs registry_key",
        ),
        (
            &etcd,
            &["--registry-cert", "c", "--registry-key", "k"],
            "registry_cert needs registry_ca",
        ),
        (
            &etcd,
            &["--registry-user", "u"],
            "registry_user needs registry_password_file",
        ),
        (
            &plain,
            &["--registry-user", "u"],
            "registry_user belongs to an etcd registry",
        ),
        (
            &plain,
            &["--cluster", "blue"],
            "cluster belongs to an etcd registry",
        ),
    ];
    for (registry, more, message) in cases {
        let arguments = [&["config", "show", "kv-transfer"], registry, more].concat();
        let output = output(&arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {said}");
        assert!(said.contains(message), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn settings_come_from_flag_environment_and_file_and_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("omni.toml");
    fs::write(
        &file,
        "[kv_transfer]\nregistry = \"etcd://file:1\"\ncluster = \"blue\"\n",
    )
    .unwrap();
    let mut show = command(&["config", "show", "kv-transfer", "--config"]);
    let shown = show
        .arg(&file)
        .env("OMNI_REGISTRY", "etcd://one:1,two:2")
        .output()
        .unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    for line in [
        "registry = \"etcd://one:1,two:2\" # environment",
        "cluster = \"blue\" # file",
    ] {
        assert!(shown.contains(line), "{shown}");
    }
}

#[tokio::test]
async fn processes_join_over_mutual_tls() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let key = KeyPair::generate().unwrap();
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    fs::write(path("ca"), ca.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(ca, key);
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let certificate = params.signed_by(&key, &issuer).unwrap();
    fs::write(path("cert"), certificate.pem()).unwrap();
    fs::write(path("key"), key.serialize_pem()).unwrap();

    let flag = |name: &str, value: &str| format!("--{name}={value}");
    let etcd = EtcdServer::start_with(
        "https",
        vec![
            flag("cert-file", &path("cert")),
            flag("key-file", &path("key")),
            flag("trusted-ca-file", &path("ca")),
            "--client-cert-auth".to_owned(),
        ],
    );
    let flags = [
        flag("registry", &format!("etcd://{}", etcd.endpoint())),
        flag("registry-ca", &path("ca")),
        flag("registry-cert", &path("cert")),
        flag("registry-key", &path("key")),
        flag("cluster", "blue"),
    ];
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    let router = Process::start("router", &flags);
    let _node = Process::start("kv-transfer", &flags);
    let joined = router.sees("a node", |members| {
        ready(members, Role::KvTransfer).len() == 1
    });
    joined.await;
}
