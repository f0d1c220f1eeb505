//! `omnictl get` and `omnictl describe`: what there is in a cluster.
mod calls;
mod items;
mod kinds;

use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::Value;

pub(crate) use self::{
    calls::{admin, control, events, members, records},
    items::{event_json, request, word},
};
use self::{
    items::{member_list, plan_list, pool_list},
    kinds::{REQUESTS, SLOTS},
};
use crate::{
    error::CliError,
    kv,
    resource::{Condition, Format, Listing, plain, selector},
    text::Console,
    yaml,
};

/// How often a watch looks.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// What can be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum What {
    /// Processes of the cluster.
    #[value(alias = "member")]
    Members,
    /// Members of one pool and role, together.
    #[value(alias = "pool")]
    Pools,
    /// Requests that run, and those that have lately ended.
    #[value(alias = "request")]
    Requests,
    /// Prefixes in the pools.
    #[value(aliases = ["slots", "slot", "prefixes"])]
    Kv,
    /// Plans that were published.
    #[value(alias = "plan")]
    Plans,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// What to list.
    what: What,
    /// Only these.
    names: Vec<String>,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Keep looking, and print what changes.
    #[arg(short, long)]
    watch: bool,
    /// Sort by a column, by its title or its field.
    #[arg(long, value_name = "COLUMN")]
    sort_by: Option<String>,
    /// Only those whose columns say so: KEY=VALUE or KEY!=VALUE, several with commas.
    #[arg(
        short = 'l',
        long,
        value_name = "SELECTOR",
        default_value = "",
        hide_default_value = true
    )]
    selector: String,
}

#[derive(Debug, Args)]
pub(crate) struct DescribeArgs {
    /// What it is.
    what: What,
    /// Its name, as `omnictl get` shows it.
    #[arg(required = true)]
    names: Vec<String>,
    #[arg(short, long, value_enum, default_value_t = Format::Yaml)]
    output: Format,
}

/// `omnictl get`.
pub(crate) async fn get(endpoint: &str, args: GetArgs, console: &Console) -> Result<(), CliError> {
    let conditions = selector(&args.selector)?;
    let shown = list(endpoint, &args, &conditions).await?;
    shown.print(args.output, console)?;
    if args.watch {
        return watch(endpoint, &args, (&conditions, shown), console).await;
    }
    Ok(())
}

/// Prints what changes, until the command is ended.
async fn watch(
    endpoint: &str,
    args: &GetArgs,
    (conditions, mut shown): (&[Condition], Listing),
    console: &Console,
) -> Result<(), CliError> {
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        // A router that is away for a moment does not end a watch.
        let now = match list(endpoint, args, conditions).await {
            Ok(now) => now,
            Err(error) => {
                console.talk(&error.to_string())?;
                continue;
            }
        };
        let (news, gone) = now.news(&shown, args.output);
        if !news.items.is_empty() {
            let text = news.text(args.output);
            // The header stands once, at the top.
            let header = usize::from(matches!(args.output, Format::Table | Format::Wide));
            let lines = text.lines().skip(header).map(|line| format!("{line}\n"));
            console.raw(lines.collect::<String>().as_bytes())?;
        }
        for name in gone {
            console.talk(&format!("{}/{name} is gone", now.kind.singular))?;
        }
        shown = now;
    }
}

async fn list(
    endpoint: &str,
    args: &GetArgs,
    conditions: &[Condition],
) -> Result<Listing, CliError> {
    // Those that are not there yet, or not any more, are no error of a watch.
    let strict = !args.watch;
    let mut listing = fetch(endpoint, args.what, &args.names).await?;
    if strict {
        listing.only(&args.names)?;
    } else if !args.names.is_empty() {
        let id = listing.kind.id;
        listing
            .items
            .retain(|item| args.names.contains(&plain(&item[id])));
    }
    listing.select(conditions)?;
    if let Some(by) = &args.sort_by {
        listing.sort(by)?;
    }
    Ok(listing)
}

/// `omnictl describe`: every field, and what has happened to it.
pub(crate) async fn describe(
    endpoint: &str,
    args: DescribeArgs,
    console: &Console,
) -> Result<(), CliError> {
    let mut listing = match args.what {
        What::Requests => requests(endpoint, &args.names, true).await?,
        what => fetch(endpoint, what, &args.names).await?,
    };
    listing.only(&args.names)?;
    let told = events(endpoint, 0).await?;
    let kind = listing.kind;
    for item in &mut listing.items {
        let object = format!("{}/{}", kind.singular, plain(&item[kind.id]));
        let about = told.iter().filter(|event| event.object == object);
        item["events"] = about.map(event_json).collect();
    }
    match args.output {
        // One document each.
        Format::Yaml => {
            let documents: Vec<_> = listing.items.iter().map(yaml::text).collect();
            console.raw(documents.join("---\n").as_bytes())
        }
        other => listing.print(other, console),
    }
}

async fn fetch(endpoint: &str, what: What, names: &[String]) -> Result<Listing, CliError> {
    match what {
        What::Members => {
            let answer = members(endpoint).await?;
            Ok(member_list(answer))
        }
        What::Pools => Ok(pool_list(members(endpoint).await?)),
        What::Requests => requests(endpoint, names, false).await,
        What::Kv => slots(endpoint).await,
        What::Plans => Ok(plan_list(members(endpoint).await?)),
    }
}

async fn requests(endpoint: &str, ids: &[String], full: bool) -> Result<Listing, CliError> {
    let records = records(endpoint, ids, full).await?;
    Ok(Listing {
        kind: &REQUESTS,
        about: vec![],
        items: records.iter().map(request).collect(),
    })
}

async fn slots(endpoint: &str) -> Result<Listing, CliError> {
    let mut items = vec![];
    let mut about = vec![];
    for mut pool in kv::pools(endpoint).await? {
        let service = pool["service"].clone();
        let slots = pool["slots"].take();
        for mut slot in slots.as_array().cloned().unwrap_or_default() {
            slot["service"] = service.clone();
            items.push(slot);
        }
        if let Some(pool) = pool.as_object_mut() {
            pool.remove("slots");
        }
        about.push(pool);
    }
    Ok(Listing {
        kind: &SLOTS,
        about: vec![("pools", Value::Array(about))],
        items,
    })
}
