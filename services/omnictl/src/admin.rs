//! Commands on the cluster: drains, cordons, versions.
use std::time::Duration;

use base::{Code, Failure, clock};
use clap::Args;
use proto::v1::{CordonRequest, DrainRequest, GetVersionRequest};
use serde::Serialize;

use crate::{
    args::Output,
    error::CliError,
    get::{admin, control, members},
    text::Console,
};

/// How often a drain is looked at.
const DRAIN_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Member id, as `omnictl get members` shows it.
    member: String,
    /// Wait until it has left.
    #[arg(short, long)]
    wait: bool,
    /// Stop waiting after so many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// Asks a member to leave, and waits for it if that was wished.
pub(crate) async fn drain(
    endpoint: &str,
    args: DrainArgs,
    console: &Console,
) -> Result<(), CliError> {
    let DrainArgs {
        member,
        wait,
        timeout,
    } = args;
    let request = control(DrainRequest {
        member_id: member.clone(),
    });
    admin(endpoint).await?.drain(request).await?;
    if !wait {
        return console.line(format!("{member} drains"));
    }
    let start = clock::now();
    let mut told = String::new();
    loop {
        let now = members(endpoint).await?.members;
        let Some(there) = now.iter().find(|other| other.id == member) else {
            return console.line(format!("{member} has left"));
        };
        let load = there.load.unwrap_or_default();
        let left = format!(
            "{member} drains: {} running, {} waiting",
            load.running, load.queued
        );
        if left != told {
            console.talk(&left)?;
            told = left;
        }
        if start.elapsed() > Duration::from_secs(timeout) {
            let message = format!("{member} has not left after {timeout} s; it goes on draining");
            return Err(Failure::new(Code::DeadlineExceeded, message).into());
        }
        tokio::time::sleep(DRAIN_INTERVAL).await;
    }
}

/// Keeps new work from members, or lets them have it again.
pub(crate) async fn cordon(
    endpoint: &str,
    members: Vec<String>,
    cordoned: bool,
    console: &Console,
) -> Result<(), CliError> {
    let mut admin = admin(endpoint).await?;
    for member_id in members {
        let request = control(CordonRequest {
            member_id: member_id.clone(),
            cordoned,
        });
        admin.cordon(request).await?;
        let word = if cordoned { "cordoned" } else { "uncordoned" };
        console.line(format!("{member_id} {word}"))?;
    }
    Ok(())
}

/// Shows this program's version and the server's.
pub(crate) async fn version(
    endpoint: Result<String, CliError>,
    client_only: bool,
    output: Output,
    console: &Console,
) -> Result<(), CliError> {
    let mut view = VersionView {
        client: env!("CARGO_PKG_VERSION").to_owned(),
        server: None,
    };
    // The client's own version is worth printing even when nobody answers.
    let asked = match endpoint {
        _ if client_only => Ok(None),
        Ok(endpoint) => server_version(&endpoint).await.map(Some),
        Err(error) => Err(error),
    };
    let outcome = asked.map(|server| view.server = server);
    match output {
        Output::Json => console.json(&view)?,
        Output::Table => console.line(view.text())?,
    }
    outcome
}

async fn server_version(endpoint: &str) -> Result<ServerVersion, CliError> {
    let ask = control(GetVersionRequest {});
    let answer = admin(endpoint).await?.get_version(ask).await?.into_inner();
    Ok(ServerVersion {
        version: answer.version,
        git_sha: answer.git_sha,
        profile: answer.profile,
    })
}

#[derive(Debug, Serialize)]
struct VersionView {
    client: String,
    server: Option<ServerVersion>,
}

#[derive(Debug, Serialize)]
struct ServerVersion {
    version: String,
    git_sha: String,
    profile: String,
}

impl VersionView {
    fn text(&self) -> String {
        let client = format!("client {}", self.client);
        match &self.server {
            Some(ServerVersion {
                version,
                git_sha,
                profile,
            }) => {
                format!("{client}\nserver {version} ({git_sha}, {profile})")
            }
            None => client,
        }
    }
}
