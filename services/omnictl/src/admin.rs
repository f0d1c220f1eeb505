//! Commands on the cluster: members, drain, versions.
use base::limits::CONTROL_DEADLINE;
use comfy_table::{Table, presets::NOTHING};
use proto::v1::{
    DrainRequest, GetVersionRequest, ListMembersRequest, Member,
    admin_service_client::AdminServiceClient,
};
use serde::Serialize;
use tonic::transport::Channel;

use crate::{args::Output, error::CliError, text::Console};

async fn connect(endpoint: &str) -> Result<AdminServiceClient<Channel>, CliError> {
    Ok(AdminServiceClient::new(
        proto::channel::connect(endpoint).await?,
    ))
}

fn control<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CONTROL_DEADLINE);
    request
}

/// Lists who is alive, by role and id.
pub(crate) async fn members(
    endpoint: &str,
    output: Output,
    console: &Console,
) -> Result<(), CliError> {
    let answer = connect(endpoint)
        .await?
        .list_members(control(ListMembersRequest {}))
        .await?;
    let answer = answer.into_inner();
    let mut rows: Vec<_> = answer.members.into_iter().map(MemberView::new).collect();
    rows.sort_by(|a, b| (&a.role, &a.id).cmp(&(&b.role, &b.id)));
    match output {
        Output::Json => console.json(&MemberList {
            epoch: answer.epoch,
            members: rows,
        }),
        Output::Table => console.line(table(&rows)),
    }
}

/// Asks a member to leave.
pub(crate) async fn drain(
    endpoint: &str,
    member: String,
    console: &Console,
) -> Result<(), CliError> {
    let request = control(DrainRequest {
        member_id: member.clone(),
    });
    connect(endpoint).await?.drain(request).await?;
    console.line(format!("{member} drains"))
}

/// Shows this program's version and the server's.
pub(crate) async fn version(
    endpoint: &str,
    client_only: bool,
    output: Output,
    console: &Console,
) -> Result<(), CliError> {
    let mut view = VersionView {
        client: env!("CARGO_PKG_VERSION").to_owned(),
        server: None,
    };
    // The client's own version is worth printing even when nobody answers.
    let asked = if client_only {
        Ok(None)
    } else {
        server_version(endpoint).await.map(Some)
    };
    let outcome = asked.map(|server| view.server = server);
    match output {
        Output::Json => console.json(&view)?,
        Output::Table => console.line(view.text())?,
    }
    outcome
}

async fn server_version(endpoint: &str) -> Result<ServerVersion, CliError> {
    let answer = connect(endpoint)
        .await?
        .get_version(control(GetVersionRequest {}))
        .await?;
    let answer = answer.into_inner();
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

#[derive(Debug, Serialize)]
struct MemberList {
    epoch: u64,
    members: Vec<MemberView>,
}

/// A member as it is printed.
#[derive(Debug, Serialize)]
struct MemberView {
    id: String,
    role: String,
    pool: String,
    state: String,
    endpoint: String,
    running: u32,
    queued: u32,
    capacity: u32,
    epoch: u64,
}

impl MemberView {
    fn new(member: Member) -> Self {
        let word = |name: &str, prefix: &str| {
            name.trim_start_matches(prefix)
                .to_ascii_lowercase()
                .replace('_', "-")
        };
        let role = word(member.role().as_str_name(), "ROLE_");
        let state = word(member.state().as_str_name(), "MEMBER_STATE_");
        let load = member.load.unwrap_or_default();
        Self {
            id: member.id,
            role,
            pool: member.pool,
            state,
            endpoint: member.endpoint,
            running: load.running,
            queued: load.queued,
            capacity: load.capacity,
            epoch: member.epoch,
        }
    }
}

fn table(rows: &[MemberView]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["ROLE", "ID", "POOL", "STATE", "LOAD", "ENDPOINT"]);
    for row in rows {
        let MemberView {
            role,
            id,
            pool,
            state,
            endpoint,
            ..
        } = row;
        let load = format!("{}+{}/{}", row.running, row.queued, row.capacity);
        table.add_row([role, id, pool, state, &load, endpoint]);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use proto::v1::{Load, MemberState, Role};

    use super::*;

    #[test]
    fn a_member_row_shows_role_state_and_load_in_words() {
        let member = Member {
            id: "m1".to_owned(),
            role: Role::DitWorker.into(),
            state: MemberState::Ready.into(),
            endpoint: "http://127.0.0.1:1".to_owned(),
            load: Some(Load {
                running: 2,
                queued: 1,
                capacity: 4,
                ..Load::default()
            }),
            ..Default::default()
        };
        let text = table(&[MemberView::new(member)]);
        let row: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            ["dit-worker", "m1", "ready", "2+1/4", "http://127.0.0.1:1"]
        );
    }
}
