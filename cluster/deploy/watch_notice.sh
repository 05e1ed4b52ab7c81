#!/usr/bin/env bash
# Tells Ray when this machine is a spot instance that its cloud takes away. The engine then moves
# what runs here to other machines, and starts a worker elsewhere, before the machine is gone.
#
#     watch_notice.sh aws|gcp HEAD:PORT
#
# It ends with the machine's Ray, or when it has told it. AWS says so two minutes before, Google half
# a minute. Both say it on a page that only the machine itself can see; while there is nothing to
# say, AWS has no such page, and Google's says FALSE.

set -uo pipefail
cloud=$1 head=$2
page=http://169.254.169.254
get() { curl --silent --fail --max-time 2 "$@"; }

# Print how many seconds are left; fail where nothing was said.
left_s() {
    local token notice when
    case $cloud in
        aws)
            token=$(get -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $page/latest/api/token) &&
                notice=$(get -H "X-aws-ec2-metadata-token: $token" \
                    $page/latest/meta-data/spot/instance-action) || return 1
            when=$(grep --only-matching '"time": *"[^"]*"' <<< "$notice" | cut -d'"' -f4)
            echo $(($(date --date "$when" +%s) - $(date +%s)))
            ;;
        gcp)
            notice=$(get -H 'Metadata-Flavor: Google' $page/computeMetadata/v1/instance/preempted)
            [[ $notice == TRUE ]] && echo 30
            ;;
    esac
}

while pgrep -x raylet > /dev/null; do
    if seconds=$(left_s); then
        exec ray drain-node --address "$head" --reason DRAIN_NODE_REASON_PREEMPTION \
            --reason-message "the $cloud spot instance ends" \
            --deadline-remaining-seconds $((seconds > 0 ? seconds : 0))
    fi
    sleep 2
done
