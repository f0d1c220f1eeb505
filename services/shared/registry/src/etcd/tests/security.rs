//! TLS, mutual TLS, and users whose role ends at their cluster.
use std::{fs, path::PathBuf};

use base::{Code, Fault as _};
use etcd_client::{Client, ConnectOptions, PermissionType, RoleRevokePermissionOptions};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

use super::{SHORT, config, options, server::EtcdServer};
use crate::{
    Etcd, EtcdConfig, EtcdTls, EtcdUser, Membership, Registry as _, Snapshots,
    conformance::{SOON, TTL, member, picture},
};

/// A certificate authority and what it has signed, as files.
struct Pki {
    dir: tempfile::TempDir,
}

impl Pki {
    fn new() -> Self {
        let pki = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        let key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        pki.write("ca.pem", &ca.self_signed(&key).unwrap().pem());
        let issuer = Issuer::new(ca, key);
        for name in ["server", "client"] {
            let key = KeyPair::generate().unwrap();
            let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
            let mut params = CertificateParams::new(names).unwrap();
            params.extended_key_usages = vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                // etcd connects to itself as well.
                ExtendedKeyUsagePurpose::ClientAuth,
            ];
            let certificate = params.signed_by(&key, &issuer).unwrap();
            pki.write(&format!("{name}.pem"), &certificate.pem());
            pki.write(&format!("{name}.key"), &key.serialize_pem());
        }
        pki
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn flags(&self, mutual: bool) -> Vec<String> {
        let path = |name: &str| self.path(name).display().to_string();
        let mut flags = vec![
            "--cert-file".to_owned(),
            path("server.pem"),
            "--key-file".to_owned(),
            path("server.key"),
        ];
        if mutual {
            flags.extend(["--trusted-ca-file".to_owned(), path("ca.pem")]);
            flags.push("--client-cert-auth".to_owned());
        }
        flags
    }

    fn tls(&self, identity: bool) -> Option<EtcdTls> {
        let pair = (self.path("client.pem"), self.path("client.key"));
        Some(EtcdTls {
            ca: self.path("ca.pem"),
            identity: identity.then_some(pair),
        })
    }
}

async fn works(config: EtcdConfig) {
    let etcd = Etcd::new(config).unwrap();
    let joined = Membership::join(std::sync::Arc::new(etcd.clone()), member("a"), options());
    let joined = joined.await.unwrap();
    let snapshots = Snapshots::follow(std::sync::Arc::new(etcd));
    let seen = snapshots.wait(SOON, |now| now.members.contains_key("a"));
    assert!(seen.await.is_some());
    joined.leave().await.unwrap();
}

/// Joins as soon as etcd, which has just been started again, has a leader.
async fn joins(etcd: &Etcd, id: &str) {
    let joined = Membership::join(std::sync::Arc::new(etcd.clone()), member(id), options());
    joined.await.unwrap();
}

/// One refused registration.
async fn refused(config: EtcdConfig) -> crate::RegistryError {
    let etcd = Etcd::new(config).unwrap();
    let late = tokio::time::timeout(SOON, etcd.register(member("x"), TTL));
    late.await.unwrap().unwrap_err()
}

#[tokio::test]
async fn tls_is_verified_both_ways() {
    let (ours, theirs) = (Pki::new(), Pki::new());
    let server = EtcdServer::start_with("https", ours.flags(false));
    let with = |tls| EtcdConfig {
        tls,
        ..config(&server)
    };
    works(with(ours.tls(false))).await;
    let error = refused(with(theirs.tls(false))).await;
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(error.to_string().contains("certificate"), "{error}");
    let error = refused(with(None)).await;
    assert_eq!(error.code(), Code::Unavailable, "{error}");

    let server = EtcdServer::start_with("https", ours.flags(true));
    let with = |tls| EtcdConfig {
        tls,
        ..config(&server)
    };
    works(with(ours.tls(true))).await;
    let stranger = Some(EtcdTls {
        ca: ours.path("ca.pem"),
        identity: Some((theirs.path("client.pem"), theirs.path("client.key"))),
    });
    for wrong in [ours.tls(false), stranger] {
        let error = refused(with(wrong)).await;
        assert_eq!(error.code(), Code::Unavailable, "{error}");
    }
}

#[tokio::test]
async fn certificates_may_be_replaced_while_the_process_runs() {
    let ours = Pki::new();
    let mut server = EtcdServer::start_with("https", ours.flags(true));
    let etcd = Etcd::new(EtcdConfig {
        tls: ours.tls(true),
        ..config(&server)
    })
    .unwrap();
    etcd.register(member("a"), TTL).await.unwrap();
    let fresh = Pki::new();
    for name in [
        "ca.pem",
        "server.pem",
        "server.key",
        "client.pem",
        "client.key",
    ] {
        fs::copy(fresh.path(name), ours.path(name)).unwrap();
    }
    server.restart();
    joins(&etcd, "b").await;
}

/// A user `omni` that may read and write the cluster `default` and nothing else.
async fn with_users(server: &EtcdServer) -> Client {
    let mut raw = Client::connect([server.endpoint()], None).await.unwrap();
    raw.user_add("root", "top secret", None).await.unwrap();
    raw.role_add("root").await.unwrap();
    raw.user_grant_role("root", "root").await.unwrap();
    raw.user_add("omni", "secret", None).await.unwrap();
    raw.role_add("omni").await.unwrap();
    let prefix = etcd_client::Permission::new(PermissionType::Readwrite, "/omni/default/");
    raw.role_grant_permission("omni", prefix.with_prefix())
        .await
        .unwrap();
    raw.user_grant_role("omni", "omni").await.unwrap();
    raw.auth_enable().await.unwrap();
    let root = ConnectOptions::new().with_user("root", "top secret");
    Client::connect([server.endpoint()], Some(root))
        .await
        .unwrap()
}

#[tokio::test]
async fn a_user_is_held_to_its_role_and_a_wrong_password_is_said_at_once() {
    let mut server = EtcdServer::start();
    with_users(&server).await;
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let user = |password_file: PathBuf| {
        let name = "omni".to_owned();
        Some(EtcdUser {
            name,
            password_file,
        })
    };
    let right = user(file("right", "secret\n"));
    let with = |user: &Option<EtcdUser>, cluster: &str| EtcdConfig {
        user: user.clone(),
        cluster: cluster.to_owned(),
        ..config(&server)
    };
    works(with(&right, "default")).await;
    let etcd = std::sync::Arc::new(Etcd::new(with(&right, "default")).unwrap());
    let joined = Membership::join(etcd.clone(), member("b"), options());
    let joined = joined.await.unwrap();
    tokio::time::sleep(SHORT * 2).await;
    let kept = picture(&*etcd).await.members["b"].epoch;
    assert_eq!(kept, joined.epoch(), "renewed, not registered again");
    joined.leave().await.unwrap();
    let error = refused(with(&right, "other")).await;
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
    let error = refused(with(&None, "default")).await;
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    let error = refused(with(&user(file("wrong", "guess")), "default")).await;
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");

    // Tokens do not survive a restart of etcd; the password does.
    let etcd = Etcd::new(with(&right, "default")).unwrap();
    etcd.register(member("a"), TTL).await.unwrap();
    server.restart();
    joins(&etcd, "b").await;
    assert!(picture(&etcd).await.members.contains_key("b"));

    // A role that is taken away ends the access, in words.
    let root = ConnectOptions::new().with_user("root", "top secret");
    let mut root = Client::connect([server.endpoint()], Some(root))
        .await
        .unwrap();
    let all = RoleRevokePermissionOptions::new().with_prefix();
    root.role_revoke_permission("omni", "/omni/default/", Some(all))
        .await
        .unwrap();
    let error = etcd.register(member("c"), TTL).await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error}");
}
