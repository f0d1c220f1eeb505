//! `omnictl top`: the cluster at a glance, drawn again and again.
use std::{fmt::Write as _, io::IsTerminal as _, time::Duration};

use clap::Args;
use proto::v1::{ClusterEvent, ListMembersResponse, Member, RequestRecord, get_response::State};
use serde_json::Value;

use crate::{
    error::CliError,
    events, get,
    resource::{millis, plain},
    text::Console,
};

/// Requests and events that one picture has room for.
const MAX_REQUESTS: usize = 16;
const MAX_EVENTS: usize = 6;
/// Characters of a bar.
const BAR: usize = 20;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Seconds between two pictures.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Draw once and end; so it is without a terminal.
    #[arg(long)]
    once: bool,
}

/// What one picture shows.
#[derive(Debug, Default)]
struct Scene {
    members: ListMembersResponse,
    requests: Vec<RequestRecord>,
    events: Vec<ClusterEvent>,
}

/// Runs the command; Ctrl-C ends it.
pub(crate) async fn run(endpoint: &str, args: TopArgs, console: &Console) -> Result<(), CliError> {
    if args.once || !std::io::stdout().is_terminal() {
        let scene = look(endpoint).await?;
        return console.raw(picture(endpoint, &scene).as_bytes());
    }
    // The first look says what is wrong, if something is, before the screen is taken.
    let mut text = picture(endpoint, &look(endpoint).await?);
    // Another screen, without a cursor.
    console.raw(b"\x1b[?1049h\x1b[?25l")?;
    let drawn = async {
        loop {
            let clear_lines = text.replace('\n', "\x1b[K\r\n");
            console.raw(format!("\x1b[H{clear_lines}\x1b[J").as_bytes())?;
            tokio::time::sleep(Duration::from_secs(args.interval)).await;
            text = match look(endpoint).await {
                Ok(scene) => picture(endpoint, &scene),
                // It may come back; until then this is what there is to see.
                Err(error) => format!("{endpoint}: {error}\n"),
            };
        }
    };
    let ended: Result<(), CliError> = tokio::select! {
        ended = drawn => ended,
        _ = tokio::signal::ctrl_c() => Ok(()),
    };
    console.raw(b"\x1b[?25h\x1b[?1049l")?;
    ended
}

async fn look(endpoint: &str) -> Result<Scene, CliError> {
    Ok(Scene {
        members: get::members(endpoint).await?,
        requests: get::records(endpoint, &[], false).await?,
        events: get::events(endpoint, 0).await?,
    })
}

fn picture(endpoint: &str, scene: &Scene) -> String {
    let running = |record: &&RequestRecord| {
        matches!(
            record.state(),
            State::Queued | State::Prefill | State::Denoise
        )
    };
    let count = |state: State| scene.requests.iter().filter(|r| r.state() == state).count();
    let mut out = format!(
        "{endpoint}   epoch {}   registry {}\n",
        scene.members.epoch,
        if scene.members.following {
            "followed"
        } else {
            "AWAY"
        }
    );
    let _ = writeln!(
        out,
        "requests   {} waiting   {} reading   {} drawing   {} done   {} failed   {} cancelled",
        count(State::Queued),
        count(State::Prefill),
        count(State::Denoise),
        count(State::Done),
        count(State::Failed),
        count(State::Cancelled)
    );
    out += "\nMEMBER                            ROLE         STATE            LOAD\n";
    let mut members: Vec<&Member> = scene.members.members.iter().collect();
    members.sort_by_key(|member| (member.role, member.id.clone()));
    for member in members {
        out += &member_line(member);
    }
    out += "\nREQUEST                           STATE      STEP                          SIZE        AGE\n";
    let mut shown = 0;
    for record in scene.requests.iter().filter(running).take(MAX_REQUESTS) {
        out += &request_line(record);
        shown += 1;
    }
    let more = scene.requests.iter().filter(running).count() - shown;
    if more > 0 {
        let _ = writeln!(out, "and {more} more");
    }
    if shown == 0 {
        out += "nothing runs\n";
    }
    out += "\nEVENTS\n";
    let from = scene.events.len().saturating_sub(MAX_EVENTS);
    for event in &scene.events[from..] {
        let _ = writeln!(out, "{}", events::line(event));
    }
    out
}

fn member_line(member: &Member) -> String {
    let load = member.load.unwrap_or_default();
    let mut state = get::word(member.state().as_str_name(), "MEMBER_STATE_");
    if member.cordoned {
        state += ",cordoned";
    }
    let role = get::word(member.role().as_str_name(), "ROLE_");
    let text = format!("{}+{}/{}", load.running, load.queued, load.capacity);
    let bar = bar(load.running, load.capacity);
    let line = format!("{:<32}  {role:<11}  {state:<15}  {bar} {text}", member.id);
    format!("{}\n", line.trim_end())
}

fn request_line(record: &RequestRecord) -> String {
    let item: Value = get::request(record);
    let steps = record
        .accepted
        .as_ref()
        .map_or(0, |accepted| accepted.steps);
    format!(
        "{:<32}  {:<9}  {} {:<7}  {:<10}  {}\n",
        record.request_id,
        plain(&item["state"]),
        bar(record.step, steps),
        plain(&item["steps"]),
        plain(&item["size"]),
        millis(record.age_ms)
    )
}

fn bar(part: u32, whole: u32) -> String {
    let (part, whole) = (u64::from(part.min(whole)), u64::from(whole.max(1)));
    let filled = usize::try_from(part * BAR as u64 / whole).unwrap_or(0);
    format!("{}{}", "█".repeat(filled), "·".repeat(BAR - filled))
}

#[cfg(test)]
mod tests {
    use proto::v1::{Accepted, Load};

    use super::*;

    #[test]
    fn a_picture_has_members_running_requests_and_the_last_events() {
        let record = |id: &str, state: State, step| RequestRecord {
            request_id: id.to_owned(),
            state: state.into(),
            step,
            age_ms: 1500.0,
            accepted: Some(Accepted {
                steps: 8,
                width: 256,
                height: 192,
                ..Accepted::default()
            }),
            ..RequestRecord::default()
        };
        let worker = Member {
            id: "w".to_owned(),
            cordoned: true,
            load: Some(Load {
                running: 3,
                capacity: 4,
                ..Load::default()
            }),
            ..Member::default()
        };
        let event = |number| ClusterEvent {
            number,
            object: format!("member/{number}"),
            ..ClusterEvent::default()
        };
        let scene = Scene {
            members: ListMembersResponse {
                members: vec![worker],
                ..ListMembersResponse::default()
            },
            requests: vec![
                record("r1", State::Denoise, 4),
                record("old", State::Done, 8),
            ],
            events: (1..9).map(event).collect(),
        };
        let text = picture("http://h:1", &scene);
        for part in [
            "registry AWAY",
            "1 drawing   1 done",
            "█████·····",
            "3+0/4",
            "4/8",
            "256x192",
            "1.5 s",
            "member/8",
            "cordoned",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(
            !text.contains("old ") && !text.contains("member/2 "),
            "{text}"
        );
        assert!(picture("x", &Scene::default()).contains("nothing runs"));
    }
}
