"""Write dashboards/*.json of boards.py: python deploy/grafana/generate.py (needs grafana-foundation-sdk)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from boards import BOARDS, Board, Curves, Event, Limits, Link, Number, Panel, States, Table, Timeline
from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    GraphDrawStyle,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
COLORS = {
    "starting": "blue",
    "waiting": "yellow",
    "live": "green",
    "closing": "orange",
    "ended": "#808080",
    "idle": "#808080",
    "ready": "light-blue",
    "running": "green",
    "stopping": "orange",
    "finished": "dark-green",
    "failed": "red",
    "quarantined": "purple",
}
Drawn = stat.Panel | timeseries.Panel | statetimeline.Panel | table.Panel


def mapping(states: States) -> ValueMap:
    """Return the word and the color of each number."""
    return ValueMap(
        {
            str(n): ValueMappingResult(state, COLORS[state], index=n)
            for n, state in enumerate(states.values, 1)
        }
    )


def thresholds(limits: Limits) -> dashboard.ThresholdsConfig:
    if limits.red < limits.yellow:
        steps = [Threshold(None, "red"), Threshold(limits.red, "yellow"), Threshold(limits.yellow, "green")]
    else:
        steps = [Threshold(None, "green"), Threshold(limits.yellow, "yellow"), Threshold(limits.red, "red")]
    return dashboard.ThresholdsConfig().steps(steps)


def link(to: Link) -> dashboard.DashboardLink:
    """Return a link of a curve or a row. The time range and the data source stay the same."""
    return dashboard.DashboardLink(to.title).url(f"/d/{to.to}&${{source:queryparam}}&${{__url_time_range}}")


def query(expr: str, number: int) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expr).ref_id("ABCDEFGH"[number])


def draw_number(panel: Number, wide: int) -> stat.Panel:
    built = stat.Panel().height(4).span(wide).unit(panel.unit)
    if panel.limits is not None:
        built = built.color_mode(BigValueColorMode.VALUE).thresholds(thresholds(panel.limits))
    return built.with_target(query(panel.expr, 0).instant())


def draw_curves(panel: Curves) -> timeseries.Panel:
    together = panel.stacked or panel.bars
    stacking = common.StackingConfig().mode(StackingMode.NORMAL if together else StackingMode.NONE)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.BOTTOM)
    legend = legend.show_legend(True).calcs(["lastNotNull", "mean", "max"]).sort_by("Max").sort_desc(True)
    built = timeseries.Panel().height(9).span(12).min(0).unit(panel.unit).description(panel.help)
    built = built.stacking(stacking).fill_opacity(40 if together else 5).legend(legend)
    if panel.bars:
        built = built.draw_style(GraphDrawStyle.BARS)
    if panel.most is not None:
        built = built.max(panel.most)
    if panel.limits is not None:
        lines = common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED)
        built = built.thresholds(thresholds(panel.limits)).thresholds_style(lines)
    if panel.leads_to is not None:
        built = built.data_links([link(panel.leads_to)])
    for number, (expr, name) in enumerate(panel.queries):
        built = built.with_target(query(expr, number).legend_format(name).range())
    return built


def draw_timeline(panel: Timeline) -> statetimeline.Panel:
    built = statetimeline.Panel().height(panel.height).span(24).mappings([mapping(panel.states)])
    if panel.leads_to is not None:
        built = built.data_links([link(panel.leads_to)])
    return built.with_target(query(panel.states.expr, 0).legend_format(panel.legend).range())


def draw_table(panel: Table) -> table.Panel:
    built = table.Panel().height(10).span(24)
    titles: dict[str, str] = {}
    for number, column in enumerate(panel.columns):
        looks = [DynamicConfigValue("unit", column.unit)]
        if isinstance(column.query, States):
            asked = query(column.query.expr, number)
            looks.append(DynamicConfigValue("mappings", [mapping(column.query)]))
        else:
            asked = query(column.query, number)
        if column.limits is not None:
            looks.append(DynamicConfigValue("thresholds", thresholds(column.limits).build()))
        if column.limits is not None or isinstance(column.query, States):
            looks.append(DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
        built = built.with_target(asked.format(PromQueryFormat.TABLE).instant())
        built = built.override_by_name(column.title, looks)
        titles[f"Value #{'ABCDEFGH'[number]}"] = column.title
    for label in panel.by:
        built = built.override_by_name(label, [DynamicConfigValue("links", [link(panel.leads_to).build()])])
    organize = {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": titles}
    built = built.with_transformation(DataTransformerConfig("merge", options={}))
    built = built.with_transformation(DataTransformerConfig("organize", options=organize))
    return built.sort_by([common.TableSortByFieldState().display_name(panel.worst).desc(True)])


def draw(panel: Panel, number: int, numbers_wide: int) -> Drawn:
    match panel:
        case Number():
            built: Drawn = draw_number(panel, numbers_wide)
        case Curves():
            built = draw_curves(panel)
        case Timeline():
            built = draw_timeline(panel)
        case Table():
            built = draw_table(panel)
    return built.id(number).title(panel.title).datasource(SOURCE)


def annotation(event: Event) -> dict[str, object]:
    """Return what the SDK's AnnotationQuery has no fields for."""
    return {
        "name": event.title,
        "datasource": SOURCE,
        "enable": True,
        "expr": event.expr,
        "step": "60s",
        "iconColor": event.color,
        "titleFormat": event.title,
        "textFormat": " ".join(f"{{{{{label}}}}}" for label in event.by),
    }


def text_of(board: Board) -> str:
    """Return the dashboard as JSON."""
    made = dashboard.Dashboard(board.title).uid(f"elasticd-{board.name}").tags(["elasticd"]).editable()
    made = made.time("now-1h", "now").refresh("10s").tooltip(DashboardCursorSync.CROSSHAIR)
    made = made.with_variable(dashboard.DatasourceVariable("source").label("source").type("prometheus"))
    for label, of in board.variables:
        variable = dashboard.QueryVariable(label).label(label).datasource(SOURCE)
        variable = variable.query(f"label_values({of}, {label})")
        made = made.with_variable(variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    for to in board.links:
        leads = dashboard.DashboardLink(to.title).type(DashboardLinkType.LINK).url(f"/d/{to.to}")
        made = made.link(leads.include_vars(True).keep_time(True))
    wide = 24 // max(1, sum(isinstance(panel, Number) for panel in board.panels))  # the numbers fill one row
    for number, panel in enumerate(board.panels, 1):
        made = made.with_panel(draw(panel, number, wide))
    events = {"annotations": {"list": [annotation(event) for event in board.events]}}
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build().to_json() | events) + "\n"


def files() -> Iterator[tuple[Path, str]]:
    for board in BOARDS:
        yield Path(__file__).parent / "dashboards" / f"{board.name}.json", text_of(board)


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
        print(path, file=sys.stderr)
