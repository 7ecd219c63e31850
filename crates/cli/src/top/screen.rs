//! The figures on a terminal.

use super::figures::{Answer, Row};
use super::{HEAD, cells};
use crate::args::{SortArg, TopArgs};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::Stylize;
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Row as TableRow, Table, TableState};
use ratatui::{DefaultTerminal, Frame};
use std::time::{Duration, Instant};

/// What is shown.
struct Screen<'a> {
    args: &'a TopArgs,
    sort: SortArg,
    /// The last two answers.
    before: Option<Answer>,
    now: Option<Answer>,
    /// Why the last question had no answer.
    failed: Option<String>,
    place: TableState,
}

/// Shows the figures until the user ends it. The terminal is restored, also in a panic.
pub(super) fn run(args: &TopArgs) -> anyhow::Result<()> {
    // An address that never answers is an error, and no empty screen.
    let now = Some(Answer::fetch(args.address)?);
    let place = TableState::new().with_selected(0);
    let mut screen = Screen { args, sort: args.sort, before: None, now, failed: None, place };
    let mut terminal = ratatui::try_init()?;
    let shown = screen.show(&mut terminal);
    ratatui::try_restore()?;
    shown
}

impl Screen<'_> {
    fn show(&mut self, terminal: &mut DefaultTerminal) -> anyhow::Result<()> {
        let mut due = Instant::now() + self.args.interval;
        loop {
            let rows = self.now.as_ref().map(|now| now.rows(self.before.as_ref(), self.sort)).unwrap_or_default();
            terminal.draw(|frame| self.draw(frame, &rows))?;
            let left = due.saturating_duration_since(Instant::now());
            if event::poll(left)?
                && let Event::Key(key) = event::read()?
                && key.is_press()
                && self.ends(key.code, key.modifiers)
            {
                return Ok(());
            }
            if Instant::now() >= due {
                self.ask();
                due = Instant::now() + self.args.interval;
            }
        }
    }

    /// Asks again. If there is no answer, the last one stays.
    fn ask(&mut self) {
        match Answer::fetch(self.args.address) {
            Ok(answer) => {
                self.before = self.now.replace(answer);
                self.failed = None;
            }
            Err(error) => self.failed = Some(format!("{error:#}")),
        }
    }

    /// Handles a key. Returns whether it ends the command.
    fn ends(&mut self, code: KeyCode, modifiers: KeyModifiers) -> bool {
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('r') => self.sort = SortArg::Rate,
            KeyCode::Char('n') => self.sort = SortArg::Name,
            KeyCode::Char('v') => self.sort = SortArg::Value,
            KeyCode::Up => self.place.select_previous(),
            KeyCode::Down => self.place.select_next(),
            KeyCode::PageUp => self.place.scroll_up_by(20),
            KeyCode::PageDown => self.place.scroll_down_by(20),
            KeyCode::Home => self.place.select_first(),
            KeyCode::End => self.place.select_last(),
            _ => {}
        }
        false
    }

    fn draw(&mut self, frame: &mut Frame<'_>, rows: &[Row]) {
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)]).areas(frame.area());
        let every = Duration::as_secs_f64(&self.args.interval);
        frame.render_widget(Line::from(format!("{} every {every} s", self.args.address)).bold(), head);
        let cells: Vec<[String; 4]> = rows.iter().map(cells).collect();
        let width = |column: usize| {
            let cells = cells.iter().map(|row| row[column].chars().count());
            let widest = cells.chain([HEAD[column].len()]).max().unwrap_or(0);
            Constraint::Length(u16::try_from(widest).unwrap_or(u16::MAX))
        };
        let cell = |(column, text): (usize, String)| {
            let alignment = if column < 2 { Alignment::Left } else { Alignment::Right };
            Cell::from(Text::from(text).alignment(alignment))
        };
        let widths = [0, 1, 2, 3].map(width);
        let line = |row: [String; 4]| TableRow::new(row.into_iter().enumerate().map(cell));
        let table = Table::new(cells.iter().cloned().map(line), widths)
            .header(line(HEAD.map(String::from)).underlined())
            .row_highlight_style(ratatui::style::Style::new().reversed());
        frame.render_stateful_widget(table, body, &mut self.place);
        let keys = format!("q ends · sorted by {:?}: r rate, n name, v value · arrows, Page Up, Page Down", self.sort);
        match &self.failed {
            None => frame.render_widget(Line::from(keys).dim(), foot),
            Some(why) => frame.render_widget(Line::from(format!("{why}; the last figures are shown")).reversed(), foot),
        }
    }
}
