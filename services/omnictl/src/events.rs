//! `omnictl events`: what has happened in a cluster, and what happens.
use clap::{Args, ValueEnum};
use proto::v1::{ClusterEvent, WatchEventsRequest};

use crate::{error::CliError, get, text::Console};

/// How events are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    Table,
    /// One object a line.
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Keep listening, and print what happens.
    #[arg(short, long)]
    watch: bool,
    /// Only what came after the event of this number.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    after: u64,
    /// Only warnings.
    #[arg(long)]
    warnings: bool,
    /// Only what is about this, such as member/ID or request/ID.
    #[arg(long = "for", value_name = "OBJECT")]
    about: Option<String>,
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

/// Runs the command.
pub(crate) async fn run(
    endpoint: &str,
    args: EventsArgs,
    console: &Console,
) -> Result<(), CliError> {
    let message = WatchEventsRequest {
        after: args.after,
        follow: args.watch,
    };
    // A stream that is followed has no deadline.
    let ask = if args.watch {
        tonic::Request::new(message)
    } else {
        get::control(message)
    };
    let mut stream = get::admin(endpoint)
        .await?
        .watch_events(ask)
        .await?
        .into_inner();
    if args.output == Form::Table {
        console.line(HEADER)?;
    }
    while let Some(told) = stream.message().await? {
        let Some(event) = told.event else { continue };
        let wanted = args
            .about
            .as_ref()
            .is_none_or(|object| *object == event.object);
        if !wanted || (args.warnings && !event.warning) {
            continue;
        }
        match args.output {
            Form::Json => console.json(&get::event_json(&event))?,
            Form::Table => console.line(line(&event))?,
        }
    }
    Ok(())
}

const HEADER: &str = "TIME                  KIND     REASON           OBJECT                                       MESSAGE";

/// An event as one line.
pub(crate) fn line(event: &ClusterEvent) -> String {
    let kind = if event.warning { "warning" } else { "normal" };
    let times = match event.count {
        0 | 1 => String::new(),
        count => format!(" (x{count})"),
    };
    format!(
        "{}  {kind:<7}  {:<15}  {:<43}  {}{times}",
        utc(event.unix_ms),
        event.reason,
        event.object,
        event.message
    )
}

/// Milliseconds since 1970 as "2026-11-30T16:45:02Z".
pub(crate) fn utc(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let (mut days, clock) = (seconds / 86_400, seconds % 86_400);
    // Years and months are counted off one by one: a list is short, and the rule is plain to see.
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) && year < 9999 {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (clock / 3600, clock / 60 % 60, clock % 60);
    format!(
        "{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z",
        days + 1
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds * 1000), text);
        }
    }

    #[test]
    fn a_line_says_how_often_it_came() {
        let event = ClusterEvent {
            warning: true,
            reason: "StageLost".to_owned(),
            object: "member/a".to_owned(),
            message: "gone".to_owned(),
            count: 3,
            ..ClusterEvent::default()
        };
        assert_eq!(
            line(&event),
            "1970-01-01T00:00:00Z  warning  StageLost        member/a                                     gone (x3)"
        );
    }
}
