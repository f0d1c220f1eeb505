//! Things that are listed: one way to choose, sort and print them, whatever they are. An item is a JSON object;
//! what a table shows of it, what a selector compares and what `--sort-by` sorts by are its fields.
use std::cmp::Ordering;

use base::Failure;
use clap::ValueEnum;
use comfy_table::{Table, presets::NOTHING};
use serde_json::{Value, json};

use crate::{error::CliError, text::Console, yaml};

/// Characters of a digest or an identity in a table.
const SHORT: usize = 12;

/// How a list is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Wide,
    Json,
    Yaml,
    Name,
}

/// One column of a table.
#[derive(Debug)]
pub(crate) struct Column {
    pub(crate) title: &'static str,
    /// Field of the item.
    pub(crate) key: &'static str,
    /// Only with `-o wide`.
    pub(crate) wide: bool,
    pub(crate) show: fn(&Value) -> String,
}

/// A column that shows its field as it is.
pub(crate) const fn column(title: &'static str, key: &'static str) -> Column {
    Column {
        title,
        key,
        wide: false,
        show: plain,
    }
}

impl Column {
    pub(crate) const fn wide(self) -> Self {
        Self { wide: true, ..self }
    }

    pub(crate) const fn shown(self, show: fn(&Value) -> String) -> Self {
        Self { show, ..self }
    }
}

/// A kind of thing.
#[derive(Debug)]
pub(crate) struct Kind {
    /// "members".
    pub(crate) plural: &'static str,
    /// "member".
    pub(crate) singular: &'static str,
    /// Field that names an item.
    pub(crate) id: &'static str,
    pub(crate) columns: &'static [Column],
}

/// Items of one kind.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) kind: &'static Kind,
    /// Fields of the whole answer, beside the list.
    pub(crate) about: Vec<(&'static str, Value)>,
    pub(crate) items: Vec<Value>,
}

/// A field as text.
pub(crate) fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// The beginning of a digest.
pub(crate) fn short(value: &Value) -> String {
    plain(value).chars().take(SHORT).collect()
}

/// Milliseconds in the unit that suits them.
pub(crate) fn duration(value: &Value) -> String {
    match value.as_f64() {
        None => "-".to_owned(),
        Some(ms) => millis(ms),
    }
}

/// Likewise.
pub(crate) fn millis(ms: f64) -> String {
    match ms {
        _ if ms < 10.0 => format!("{ms:.1} ms"),
        _ if ms < 1e3 => format!("{ms:.0} ms"),
        _ if ms < 60e3 => format!("{:.1} s", ms / 1e3),
        _ if ms < 3_600e3 => format!("{:.0} min", ms / 60e3),
        _ => format!("{:.1} h", ms / 3_600e3),
    }
}

/// Bytes in the unit that suits them.
pub(crate) fn bytes(value: &Value) -> String {
    let Some(bytes) = value.as_f64() else {
        return "-".to_owned();
    };
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut scaled = bytes;
    let mut unit = units[0];
    for next in &units[1..] {
        if scaled < 1024.0 {
            break;
        }
        (scaled, unit) = (scaled / 1024.0, next);
    }
    let digits = usize::from(unit != "B" && scaled < 100.0);
    format!("{scaled:.digits$} {unit}")
}

/// One condition of a selector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Condition {
    key: String,
    value: String,
    equal: bool,
}

/// Reads `KEY=VALUE[,KEY!=VALUE]`.
pub(crate) fn selector(text: &str) -> Result<Vec<Condition>, Failure> {
    let one = |part: &str| {
        let (key, value, equal) = match (part.split_once("!="), part.split_once('=')) {
            (Some((key, value)), _) => (key, value, false),
            (None, Some((key, value))) => (key, value.trim_start_matches('='), true),
            (None, None) => {
                let reason = format!("must be KEY=VALUE or KEY!=VALUE, got {part:?}");
                return Err(Failure::invalid("selector", reason));
            }
        };
        Ok(Condition {
            key: key.trim().to_ascii_lowercase(),
            value: value.trim().to_owned(),
            equal,
        })
    };
    let parts = text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty());
    parts.map(one).collect()
}

impl Kind {
    /// The field that a user names by its key or by the title of its column.
    fn key(&self, setting: &str, named: &str) -> Result<&'static str, Failure> {
        let wanted = named.to_ascii_lowercase();
        let same =
            |column: &&Column| column.key == wanted || column.title.to_ascii_lowercase() == wanted;
        self.columns
            .iter()
            .find(same)
            .map(|column| column.key)
            .ok_or_else(|| {
                let keys: Vec<_> = self.columns.iter().map(|column| column.key).collect();
                let reason = format!("{} have no {named:?}, but {}", self.plural, keys.join(", "));
                Failure::invalid(setting, reason)
            })
    }

    fn name(&self, item: &Value) -> String {
        plain(&item[self.id])
    }
}

impl Listing {
    /// Keeps what every condition holds for.
    pub(crate) fn select(&mut self, conditions: &[Condition]) -> Result<(), Failure> {
        for condition in conditions {
            let key = self.kind.key("selector", &condition.key)?;
            self.items
                .retain(|item| (plain(&item[key]) == condition.value) == condition.equal);
        }
        Ok(())
    }

    /// Keeps the named ones.
    ///
    /// # Errors
    /// One that is not there, by name.
    pub(crate) fn only(&mut self, names: &[String]) -> Result<(), Failure> {
        if names.is_empty() {
            return Ok(());
        }
        for name in names {
            if !self.items.iter().any(|item| self.kind.name(item) == *name) {
                let message = format!("no {} {name:?}", self.kind.singular);
                return Err(Failure::new(base::Code::NotFound, message));
            }
        }
        self.items
            .retain(|item| names.contains(&self.kind.name(item)));
        Ok(())
    }

    /// Sorts by a field: numbers by value, the rest as text.
    pub(crate) fn sort(&mut self, by: &str) -> Result<(), Failure> {
        let key = self.kind.key("sort-by", by)?;
        self.items.sort_by(|a, b| order(&a[key], &b[key]));
        Ok(())
    }

    /// The whole list in this form, with a line end.
    pub(crate) fn text(&self, format: Format) -> String {
        match format {
            Format::Table | Format::Wide => self.table(format == Format::Wide),
            Format::Json => format!("{}\n", self.document()),
            Format::Yaml => yaml::text(&self.document()),
            Format::Name => {
                let line = |item| format!("{}/{}\n", self.kind.singular, self.kind.name(item));
                self.items.iter().map(line).collect()
            }
        }
    }

    fn document(&self) -> Value {
        let mut document = json!({});
        for (key, value) in &self.about {
            document[*key] = value.clone();
        }
        document[self.kind.plural] = Value::Array(self.items.clone());
        document
    }

    fn table(&self, wide: bool) -> String {
        let columns = || {
            self.kind
                .columns
                .iter()
                .filter(move |column| wide || !column.wide)
        };
        let mut table = Table::new();
        table.load_style(NOTHING);
        table.set_header(columns().map(|column| column.title));
        for item in &self.items {
            table.add_row(columns().map(|column| (column.show)(&item[column.key])));
        }
        // Cells of the last column are not padded.
        let text = table.trim_fmt();
        let lines = text.lines().map(str::trim_end);
        lines.map(|line| format!("{line}\n")).collect()
    }

    /// What has changed since `before`, in the same form; with what is gone named on the terminal.
    pub(crate) fn news(&self, before: &Self, format: Format) -> (Self, Vec<String>) {
        // What a table does not show is no news in a table.
        let seen = |item: &Value| match format {
            Format::Table | Format::Wide => {
                let wide = format == Format::Wide;
                let columns = self
                    .kind
                    .columns
                    .iter()
                    .filter(|column| wide || !column.wide);
                let cells = columns.map(|column| (column.show)(&item[column.key]));
                Value::from(cells.collect::<Vec<_>>())
            }
            Format::Name => item[self.kind.id].clone(),
            Format::Json | Format::Yaml => item.clone(),
        };
        let fresh = self.items.iter().filter(|item| {
            let name = self.kind.name(item);
            let was = before.items.iter().find(|old| self.kind.name(old) == name);
            was.is_none_or(|old| seen(old) != seen(item))
        });
        let gone = before.items.iter().map(|old| self.kind.name(old));
        let is = |name: &String| self.items.iter().any(|item| self.kind.name(item) == *name);
        let news = Self {
            kind: self.kind,
            about: self.about.clone(),
            items: fresh.cloned().collect(),
        };
        (news, gone.filter(|name| !is(name)).collect())
    }

    /// Prints the list.
    pub(crate) fn print(&self, format: Format, console: &Console) -> Result<(), CliError> {
        if self.items.is_empty() && matches!(format, Format::Table | Format::Wide) {
            return console.talk(&format!("no {}", self.kind.plural));
        }
        console.raw(self.text(format).as_bytes())
    }
}

fn order(a: &Value, b: &Value) -> Ordering {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        _ => plain(a).cmp(&plain(b)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOATS: Kind = Kind {
        plural: "boats",
        singular: "boat",
        id: "id",
        columns: &[
            column("ID", "id"),
            column("COLOUR", "colour"),
            column("LENGTH", "length"),
            column("WEIGHT", "weight").wide().shown(bytes),
        ],
    };

    fn boats() -> Listing {
        static KIND: Kind = BOATS;
        Listing {
            kind: &KIND,
            about: vec![("epoch", json!(3))],
            items: vec![
                json!({"id": "a", "colour": "red", "length": 10, "weight": 1536}),
                json!({"id": "b", "colour": "blue", "length": 9, "weight": 3}),
                json!({"id": "c", "colour": "", "length": 11, "weight": null}),
            ],
        }
    }

    fn names(listing: &Listing) -> String {
        let names: Vec<_> = listing
            .items
            .iter()
            .map(|item| plain(&item["id"]))
            .collect();
        names.join("")
    }

    #[test]
    fn selectors_choose_by_any_column_and_an_unknown_one_names_those_there_are() {
        for (text, left) in [
            ("colour=red", "a"),
            ("COLOUR!=red", "bc"),
            ("length=9,id=b", "b"),
            ("", "abc"),
        ] {
            let mut listing = boats();
            listing.select(&selector(text).unwrap()).unwrap();
            assert_eq!(names(&listing), left, "{text}");
        }
        let error = boats().select(&selector("sail=big").unwrap()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("selector"));
        assert!(error.message.contains("length, weight"), "{error:?}");
        assert!(selector("red").is_err());
    }

    #[test]
    fn numbers_sort_by_value_and_names_must_be_there() {
        let mut listing = boats();
        listing.sort("LENGTH").unwrap();
        assert_eq!(names(&listing), "bac");
        assert!(listing.sort("sail").is_err());
        listing.only(&["c".to_owned()]).unwrap();
        assert_eq!(names(&listing), "c");
        assert!(
            boats()
                .only(&["z".to_owned()])
                .unwrap_err()
                .message
                .contains("no boat")
        );
    }

    #[test]
    fn each_form_has_what_it_promises() {
        let listing = boats();
        assert!(!listing.text(Format::Table).contains("WEIGHT"));
        let wide = listing.text(Format::Wide);
        assert!(wide.contains("1.5 KiB") && wide.contains("3 B"), "{wide}");
        assert_eq!(listing.text(Format::Name), "boat/a\nboat/b\nboat/c\n");
        let json: Value = serde_json::from_str(&listing.text(Format::Json)).unwrap();
        assert_eq!(
            (&json["epoch"], &json["boats"][1]["id"]),
            (&json!(3), &json!("b"))
        );
        assert!(listing.text(Format::Yaml).contains("- colour: red"));
    }

    #[test]
    fn news_are_what_changed_in_the_form_that_is_shown() {
        let (before, mut now) = (boats(), boats());
        now.items[0]["weight"] = json!(9);
        now.items[1]["colour"] = json!("green");
        now.items.remove(2);
        let (table, gone) = now.news(&before, Format::Table);
        assert_eq!((names(&table).as_str(), gone), ("b", vec!["c".to_owned()]));
        assert_eq!(names(&now.news(&before, Format::Json).0), "ab");
    }
}
