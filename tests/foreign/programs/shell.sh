#!/bin/sh
echo "rank $RANK of $WORLD_SIZE got $# arguments: $*"
