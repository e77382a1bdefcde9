"""The CSS that elasticd's pages share. Each page defines the colours."""

TILES_NOTES_TABLES = """\
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.6rem;margin:1rem 0}
.tile{border:1px solid var(--line);border-radius:.5rem;padding:.45rem .7rem}
.tile b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums}
.tile span{color:var(--dim);font-size:.8rem}
.note{border-left:.25rem solid var(--warn);padding:.3rem .8rem;margin:.8rem 0}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
"""
