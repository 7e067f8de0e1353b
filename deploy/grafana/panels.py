"""What both dashboards are made of: queries, variables, colours, and one function for each kind of panel.

Each function demands what a reader needs of a panel: a title, a description, a unit, and a text for the
case that there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from deploy.grafana.queries import CHECKS, POLICY_CODES, SAFE

# The dashboards are written as Grafana 10.4 would: it and every later one reads that, and migrates it on its own.
# For the same reason they are of the library's first kind, which it calls deprecated: the second needs Grafana 12.
SCHEMA_VERSION = 39
PLUGIN_VERSION = "10.4.0"

FLEET_UID, ENGINE_UID = "gc-sidecar-fleet", "gc-sidecar-engine"
TAGS = ["gc-sidecar", "python-gc", "vllm"]
DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
# {{pod}} is empty outside Kubernetes.
ENGINE_LEGEND = "{{instance}} {{pod}}"
PROCESS_LEGEND = "{{role}} dp {{dp_rank}} rank {{rank}}"

GREEN, YELLOW, ORANGE, RED = "green", "yellow", "orange", "red"
BLUE, PURPLE, GREY = "blue", "purple", "#8e8e8e"
POLICY_COLOURS = {"off": GREY, "freeze": BLUE, "budget": PURPLE}
STATE_COLOURS = {
    "applied": GREEN,
    "pending": YELLOW,
    "drifted": ORANGE,
    "stale": RED,
    "gone": GREY,
    "uncovered": PURPLE,
    "refused": "dark-red",
}

Steps = Sequence[tuple[float | None, str]]
"""Thresholds: (from which value on, colour); the first value is None."""
NEUTRAL: Steps = ((None, GREEN),)


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that says how an engine stands, and how it reads on either dashboard."""

    title: str
    description: str
    expr: str
    unit: str
    empty: str
    steps: Steps = NEUTRAL
    decimals: int | None = None
    mappings: Sequence[models.ValueMapping] = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Where a panel stands. Its id is written down, not counted: links to a panel outlive its neighbours."""

    id: int
    width: int
    height: int
    builder: Builder[models.Panel]


@dataclass(frozen=True)
class Row:
    id: int
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Column:
    """A figure as the column of a table."""

    figure: Figure
    coloured: bool = False
    """The cell's background tells what the thresholds or mappings say."""
    width: int | None = None


@dataclass(frozen=True)
class LabelColumn:
    """A label of the queries that the table shows."""

    label: str
    title: str
    links: Sequence[Mapping[str, object]] = ()
    mappings: Sequence[models.ValueMapping] = ()
    coloured: bool = False
    width: int | None = None


@dataclass(frozen=True)
class Lines:
    """How a time series panel looks where it is not a plain line from 0 up."""

    min: float | None = 0
    max: float | None = None
    bars: bool = False
    stacked: bool = False
    points: bool = False
    decimals: int | None = None
    steps: Steps = NEUTRAL
    colours: Mapping[str, str] = field(default_factory=dict)
    """Colours of series, by name."""
    dashed: Sequence[str] = ()
    """Series, by name, that are limits."""


def thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in steps])
    )


def texts(meanings: Mapping[str, tuple[str, str]]) -> models.ValueMap:
    """Value mappings: each value's (text, colour)."""
    return models.ValueMap(
        options={
            value: models.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(meanings.items())
        }
    )


def from_on(start: float, text: str, colour: str) -> models.RangeMap:
    """The mapping of every value that is at least `start`."""
    return models.RangeMap(
        options=models.DashboardRangeMapOptions(
            from_val=start,
            to=None,
            result=models.ValueMappingResult(text=text, color=colour, index=100),
        )
    )


VERDICTS = texts(
    {str(check.code): (check.verdict, check.colour) for check in CHECKS} | {"0": SAFE},
)
POLICIES = texts(
    {str(code): (mode, POLICY_COLOURS[mode]) for mode, code in POLICY_CODES.items()}
    | {"0": ("unknown", RED)}
)
UP_DOWN = texts({"0": ("down", RED), "1": ("up", GREEN)})
MEASURED = (texts({"0": ("none", "transparent")}), from_on(1, "open", BLUE))

NO_SIDECAR = "No sidecar was scraped in this time range"
ABOUT_POLICIES = (
    "off: CPython's own GC. freeze: no automatic full collection. budget: full collections go on "
    "but are kept short."
)


def property_(name: str, value: object) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=name, value=value)


def fixed_colour(colour: str) -> models.DynamicConfigValue:
    return property_("color", {"mode": "fixed", "fixedColor": colour})


def ref_ids(count: int) -> list[str]:
    return [chr(ord("A") + number) for number in range(count)]


def range_query(query: Query, ref_id: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(DATASOURCE)
        .editor_mode(prometheus_models.QueryEditorMode.CODE)
        .expr(query.expr)
        .legend_format(query.legend)
        .range()
        .ref_id(ref_id)
    )


def instant_query(expr: str, ref_id: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(DATASOURCE)
        .editor_mode(prometheus_models.QueryEditorMode.CODE)
        .expr(expr)
        .format(prometheus_models.PromQueryFormat.TABLE)
        .instant()
        .ref_id(ref_id)
    )


def time_series(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    empty: str,
    look: Lines = Lines(),
) -> Builder[models.Panel]:
    """Lines or bars over time, with each series' last and highest value in the legend."""
    style = (
        common_models.GraphDrawStyle.BARS
        if look.bars
        else common_models.GraphDrawStyle.POINTS
        if look.points
        else common_models.GraphDrawStyle.LINE
    )
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value(empty)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .draw_style(style)
        .line_width(1)
        .fill_opacity(60 if look.bars else 30 if look.stacked else 8)
        .point_size(6 if look.points else 4)
        .show_points(
            common_models.VisibilityMode.ALWAYS
            if look.points
            else common_models.VisibilityMode.AUTO
        )
        .thresholds(thresholds(look.steps))
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.TABLE)
            .placement(common_models.LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if len(look.steps) > 1:
        panel = panel.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        )
    if look.stacked:
        panel = panel.stacking(
            common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A")
        )
    if look.min is not None:
        panel = panel.min(look.min)
    if look.max is not None:
        panel = panel.max(look.max)
    if look.decimals is not None:
        panel = panel.decimals(look.decimals)
    for name, colour in look.colours.items():
        panel = panel.override_by_name(name, [fixed_colour(colour)])
    for name in look.dashed:
        panel = panel.override_by_name(
            name,
            [
                fixed_colour(RED),
                property_("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
                property_("custom.fillOpacity", 0),
            ],
        )
    for ref_id, query in zip(ref_ids(len(queries)), queries, strict=True):
        panel = panel.with_target(range_query(query, ref_id))
    return panel


def single_value(figure: Figure) -> Builder[models.Panel]:
    """One value, now, on a background that says whether it is good."""
    panel = (
        stat.Panel()
        .title(figure.title)
        .description(figure.description)
        .datasource(DATASOURCE)
        .unit(figure.unit)
        .no_value(figure.empty)
        .thresholds(thresholds(figure.steps))
        .mappings(list(figure.mappings))
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .justify_mode(common_models.BigValueJustifyMode.CENTER)
        .text_mode(common_models.BigValueTextMode.VALUE)
        .orientation(common_models.VizOrientation.AUTO)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .with_target(
            instant_query(figure.expr, "A").format(prometheus_models.PromQueryFormat.TIME_SERIES)
        )
    )
    if figure.decimals is not None:
        panel = panel.decimals(figure.decimals)
    return panel


def timeline(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    empty: str,
    mappings: Sequence[models.ValueMapping] = (),
    row_mappings: Mapping[str, Sequence[models.ValueMapping]] | None = None,
) -> Builder[models.Panel]:
    """A row for each series, whose colour is its state; `row_mappings` are those of rows, by name."""
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("none")
        .no_value(empty)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .thresholds(thresholds(((None, GREY),)))
        .mappings(list(mappings))
        .fill_opacity(80)
        .line_width(0)
        .merge_values(True)
        .row_height(0.8)
        .show_value(common_models.VisibilityMode.AUTO)
        .align_value(common_models.TimelineValueAlignment.LEFT)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.SINGLE))
    )
    for name, mapping in (row_mappings or {}).items():
        panel = panel.override_by_name(name, [property_("mappings", list(mapping))])
    for ref_id, query in zip(ref_ids(len(queries)), queries, strict=True):
        panel = panel.with_target(range_query(query, ref_id))
    return panel


def bucket_heatmap(title: str, description: str, expr: str, *, empty: str) -> Builder[models.Panel]:
    """A histogram of seconds over time: `expr` has one series for each `le`."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("s")
        .no_value(empty)
        # Columns of a minute: narrower ones show little more, and each event falls into several of them.
        .interval("1m")
        .calculate(False)
        .cell_gap(1)
        .cell_values(heatmap.CellValues().unit("short").decimals(0))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
            .reverse(False)
            .fill("dark-orange")
        )
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(common_models.HeatmapCellLayout.AUTO))
        .show_value(common_models.VisibilityMode.NEVER)
        .show_legend()
        .tooltip(heatmap.HeatmapTooltip().mode(common_models.TooltipDisplayMode.SINGLE))
        .y_axis(heatmap.YAxisConfig().unit("s").axis_placement(common_models.AxisPlacement.LEFT))
        .exemplars_color("rgba(255,0,255,0.7)")
        .with_target(
            range_query(Query(expr, "{{le}}"), "A").format(
                prometheus_models.PromQueryFormat.HEATMAP
            )
        )
    )


def joined_table(
    title: str,
    description: str,
    labels: Sequence[LabelColumn],
    columns: Sequence[Column],
    *,
    empty: str,
    first: Sequence[str] = (),
    sort_by: str | None = None,
    hidden: Sequence[str] = (),
) -> Builder[models.Panel]:
    """A row for each combination of labels, a column for each query.

    All queries have the same labels, so `merge` puts rows together that agree in time and labels; a label that
    does not exist (outside Kubernetes) makes no column. `first` names the columns that come before the labels,
    `hidden` those whose value is not shown, for their query brings a label.
    """
    values = dict(zip(ref_ids(len(columns)), columns, strict=True))
    names = {column.figure.title: f"Value #{ref_id}" for ref_id, column in values.items()}
    names |= {label.title: label.label for label in labels}
    # Grafana calls a value "Value #A" or, where no other query has an answer, "Value". The first one always has.
    titles = {name: title for title, name in names.items()} | {"Value": columns[0].figure.title}
    order = [
        *first,
        *(label.title for label in labels if label.title not in first),
        *(column.figure.title for column in columns if column.figure.title not in first),
    ]
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .no_value(empty)
        .unit("none")
        .align(common_models.FieldTextAlignment.AUTO)
        .cell_options(common_models.TableAutoCellOptions())
        .cell_height(common_models.TableCellHeight.SM)
        .filterable(True)
        .show_header(True)
        .thresholds(thresholds(NEUTRAL))
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True}
                    | {name: True for name, title in titles.items() if title in hidden},
                    "indexByName": {name: order.index(title) for name, title in titles.items()},
                    "renameByName": titles,
                },
            )
        )
    )
    if sort_by is not None:
        panel = panel.sort_by([common.TableSortByFieldState().display_name(sort_by).desc(True)])
    for label in labels:
        properties = [property_("noValue", "-")]
        if label.links:
            properties.append(property_("links", list(label.links)))
        properties += appearance(label.mappings, label.coloured, label.width)
        panel = panel.override_by_name(label.title, properties)
    for ref_id, column in values.items():
        figure = column.figure
        panel = panel.with_target(instant_query(figure.expr, ref_id))
        if figure.title in hidden:
            continue
        properties = [
            property_("unit", figure.unit),
            property_("noValue", figure.empty),
            property_("description", figure.description),
            property_("thresholds", thresholds(figure.steps).build()),
        ]
        if figure.decimals is not None:
            properties.append(property_("decimals", figure.decimals))
        properties += appearance(figure.mappings, column.coloured, column.width)
        panel = panel.override_by_name(figure.title, properties)
    return panel


def appearance(
    mappings: Sequence[models.ValueMapping], coloured: bool, width: int | None
) -> list[models.DynamicConfigValue]:
    properties = []
    if mappings:
        properties.append(property_("mappings", list(mappings)))
    if coloured:
        cell = common_models.TableColoredBackgroundCellOptions(
            mode=common_models.TableCellBackgroundDisplayMode.BASIC
        )
        properties += [property_("custom.cellOptions", cell), colour_by_thresholds()]
    if width is not None:
        properties.append(property_("custom.width", width))
    return properties


def colour_by_thresholds() -> models.DynamicConfigValue:
    return property_("color", {"mode": "thresholds"})


def variables(one_engine: bool) -> list[Builder[models.VariableModel]]:
    """`datasource`, then a chain in which each narrows down the next.

    A label that does not exist leaves a variable at All, which is ".*" and matches an absent label. Only
    `instance` is always there; the engine's dashboard shows one at a time.
    """
    chain = ("cluster", "namespace", "pod", "instance")
    labels = {
        "cluster": "Cluster",
        "namespace": "Namespace",
        "pod": "Pod",
        "instance": "Engine (instance)",
    }
    built: list[Builder[models.VariableModel]] = [
        dashboard.DatasourceVariable("datasource")
        .label("Prometheus")
        .description("The Prometheus that scrapes the sidecars.")
        .type("prometheus")
    ]
    for position, name in enumerate(chain):
        narrowed = ", ".join(f'{earlier}=~"${earlier}"' for earlier in chain[:position])
        query = f"label_values(gc_sidecar_engine_up{{{narrowed}}}, {name})"
        variable = (
            dashboard.QueryVariable(name)
            .label(labels[name])
            .datasource(DATASOURCE)
            .query(query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.NATURAL_ASC)
        )
        if name == "instance" and one_engine:
            variable = variable.multi(False).include_all(False)
        else:
            variable = (
                variable.multi(True)
                .include_all(True)
                .all_value(".*")
                .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
            )
        built.append(variable)
    return built


def build(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[Row],
    *,
    one_engine: bool,
    links: Sequence[Builder[models.DashboardLink]],
    annotations: Sequence[Builder[models.AnnotationQuery]] = (),
) -> models.Dashboard:
    """The dashboard, its panels placed from left to right, row by row."""
    builder = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(TAGS)
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .version(1)
        .variables(variables(one_engine))
        .annotations(list(annotations))
        .links(list(links))
    )
    for row in rows:
        builder = builder.with_row(dashboard.Row(row.title).id(row.id))
        for place in row.panels:
            panel = place.builder.build()
            panel.id_val = place.id
            panel.plugin_version = PLUGIN_VERSION
            panel.grid_pos = models.GridPos(w=place.width, h=place.height, x=0, y=0)
            builder = builder.with_panel(place.builder)
    built = builder.build()
    built.schema_version = SCHEMA_VERSION
    return built


def dashboard_link(title: str, tooltip: str, uid: str) -> dashboard.DashboardLink:
    """A link in the dashboard's head that takes variables and time range along."""
    return (
        dashboard.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .url(f"/d/{uid}")
        .tooltip(tooltip)
        .icon("dashboard")
        .include_vars(True)
        .keep_time(True)
        .target_blank(False)
    )


def annotation(
    name: str, expr: str, *, colour: str, title: str, text: str, labels: Sequence[str]
) -> dashboard.AnnotationQuery:
    """Marks on every graph where `expr` is above 0."""
    target = prometheus.Dataquery().expr(expr).range().ref_id("Anno").legend_format("")
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .hide(False)
        .icon_color(colour)
        # Grafana 10 reads expr beside the name, later ones in the target.
        .expr(expr)
        .target(target)
        .title_format(title)
        .text_format(text)
        .tag_keys(",".join(labels))
    )
