//! What is to be known of a cluster and of etcd.
use std::time::Duration;

use base::clock::{self, Clock as _, SystemClock};
use proto::v1::{GetVersionRequest, ListMembersResponse, MemberState, Role};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{Finding, failed, ok, skipped};
use crate::get;

/// Clocks further apart than this make logs and certificates misleading.
const MOST_APART_MS: u64 = 1_000;
/// How long one member of etcd may take.
const ETCD_DEADLINE: Duration = Duration::from_secs(3);
/// Largest answer that is read, in bytes.
const MAX_ANSWER: u64 = 4096;

/// The router, its version and clock, the registry, the stages. The flag: the router answers on this machine.
pub(super) async fn cluster(endpoint: &str) -> (Vec<Finding>, bool) {
    const CHECK: &str = "router";
    let asked = async {
        let mut admin = get::admin(endpoint).await?;
        let before = (SystemClock.unix_millis(), clock::now());
        let ask = get::control(GetVersionRequest {});
        let version = admin.get_version(ask).await?.into_inner();
        let took = clock::millis_since(before.1);
        let members = get::members(endpoint).await?;
        Ok::<_, crate::error::CliError>((version, before.0, took, members))
    };
    let (version, sent_ms, took, members) = match asked.await {
        Ok(answered) => answered,
        Err(error) => {
            let hint = "start it (omni up, omni router), or say where it is: --endpoint, --context; \
                        --local checks this machine alone";
            return (vec![failed(CHECK, error.to_string(), hint)], false);
        }
    };
    let here = ["127.0.0.1", "localhost", "[::1]"];
    let ours = here
        .iter()
        .any(|host| endpoint.contains(&format!("//{host}:")));
    let mut all = vec![ok(
        CHECK,
        format!("answers at {endpoint} after {took:.1} ms"),
    )];
    all.push(versions(env!("CARGO_PKG_VERSION"), &version.version));
    all.push(clocks(sent_ms, version.unix_ms, took));
    all.push(registry(&members));
    all.extend(
        [Role::ArStage, Role::KvTransfer, Role::DitWorker].map(|role| stage(&members, role)),
    );
    (all, ours)
}

fn versions(own: &str, server: &str) -> Finding {
    const CHECK: &str = "version";
    // Before 1.0 the second number says what fits together.
    let kind = |version: &str| {
        version
            .split('.')
            .take(2)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    if kind(own) == kind(server) {
        ok(CHECK, format!("{own} here, {server} there"))
    } else {
        let hint = "take the omnictl of the server's release";
        failed(CHECK, format!("{own} here, {server} there"), hint)
    }
}

/// The router read its clock at some moment of the call.
fn clocks(sent_ms: u64, there_ms: u64, took_ms: f64) -> Finding {
    const CHECK: &str = "clock";
    if there_ms == 0 {
        return skipped(CHECK, "the server does not tell its time");
    }
    let took = Duration::try_from_secs_f64(took_ms / 1e3).unwrap_or_default();
    let latest = sent_ms + u64::try_from(took.as_millis()).unwrap_or(0);
    let apart = sent_ms
        .saturating_sub(there_ms)
        .max(there_ms.saturating_sub(latest));
    if apart <= MOST_APART_MS {
        return ok(CHECK, format!("at most {apart} ms from the router's"));
    }
    let hint = "synchronise both (timedatectl, chronyc tracking)";
    failed(CHECK, format!("{apart} ms from the router's"), hint)
}

fn registry(members: &ListMembersResponse) -> Finding {
    const CHECK: &str = "registry";
    if members.following {
        let (count, epoch) = (members.members.len(), members.epoch);
        return ok(CHECK, format!("followed, {count} members at epoch {epoch}"));
    }
    failed(
        CHECK,
        format!(
            "away for {:.1} s, the last picture stands",
            members.stale_ms as f64 / 1e3
        ),
        "look at etcd (--etcd HOST:PORT checks it) and at the way from the router to it",
    )
}

fn stage(members: &ListMembersResponse, role: Role) -> Finding {
    let check = match role {
        Role::ArStage => "ar-stage",
        Role::KvTransfer => "kv-transfer",
        _ => "dit-worker",
    };
    let all = || {
        members
            .members
            .iter()
            .filter(|member| member.role() == role)
    };
    let works =
        |member: &&proto::v1::Member| member.state() == MemberState::Ready && !member.cordoned;
    let ready = all().filter(works).count();
    let found = format!("{ready} of {} take work", all().count());
    if ready > 0 {
        ok(check, found)
    } else {
        let hint = format!("start one, or see what keeps it: omnictl get members -l role={check}");
        failed(check, found, hint)
    }
}

/// Every member of etcd says that it is healthy.
pub(super) async fn etcd(members: &[String]) -> Finding {
    const CHECK: &str = "etcd";
    if members.is_empty() {
        return skipped(CHECK, "no --etcd");
    }
    let mut bad = vec![];
    for member in members {
        let asked = tokio::time::timeout(ETCD_DEADLINE, health(member)).await;
        match asked {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => bad.push(format!("{member} is not healthy")),
            Ok(Err(error)) => bad.push(format!("{member}: {error}")),
            Err(_) => bad.push(format!("{member} does not answer")),
        }
    }
    if bad.is_empty() {
        return ok(CHECK, format!("{} healthy", members.len()));
    }
    let hint = "etcdctl endpoint status; behind TLS this check sees only that a port is open";
    failed(CHECK, bad.join("; "), hint)
}

async fn health(member: &str) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(member).await?;
    let ask = format!("GET /health HTTP/1.1\r\nhost: {member}\r\nconnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut answer).await?;
    Ok(answer.contains(r#""health":"true""#) || answer.contains(r#""health": "true""#))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Outcome;

    #[test]
    fn clocks_may_differ_by_as_much_as_the_call_took() {
        assert_eq!(clocks(10_000, 10_400, 500.0).outcome, Outcome::Ok);
        assert_eq!(clocks(10_000, 11_400, 500.0).outcome, Outcome::Ok);
        assert_eq!(clocks(10_000, 11_600, 500.0).outcome, Outcome::Failed);
        assert_eq!(clocks(10_000, 8_900, 500.0).outcome, Outcome::Failed);
        assert_eq!(clocks(10_000, 0, 1.0).outcome, Outcome::Skipped);
    }

    #[test]
    fn versions_fit_when_their_first_two_numbers_are_equal() {
        assert_eq!(versions("0.1.0", "0.1.7").outcome, Outcome::Ok);
        assert_eq!(versions("0.1.0", "0.2.0").outcome, Outcome::Failed);
        assert_eq!(versions("0.1.0", "").outcome, Outcome::Failed);
    }

    #[tokio::test]
    async fn an_etcd_that_is_away_is_a_failure_and_none_is_none() {
        assert_eq!(etcd(&[]).await.outcome, Outcome::Skipped);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        assert_eq!(etcd(&[address]).await.outcome, Outcome::Failed);
    }
}
